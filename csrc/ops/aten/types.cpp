// Shapes and dtypes of the results of ATen operators: the operator itself
// computes them for tensors without data.
#include <ATen/EmptyTensor.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <exception>
#include <mutex>
#include <optional>
#include <string_view>
#include <type_traits>
#include <unordered_map>
#include <utility>

#include "ops/aten/call.h"
#include "ops/operands/aten_types.h"

namespace popsim::ops {
namespace {

// On the CPU, the auxiliary results of these have other shapes than without
// data.
constexpr std::array<std::string_view, 2> kOtherOnCpu{
    "aten::_embedding_bag", "aten::_embedding_bag_forward_only"};

at::Tensor without_data(const graph::Tensor& tensor) {
  return at::Tensor(at::detail::empty_strided_meta(
      tensor.shape, tensor.strides, to_scalar_type(tensor.dtype)));
}

TensorType type_of(const at::Tensor& result) {
  if (!result.defined()) return TensorType::none();
  return {from_scalar_type(result.scalar_type()), result.sizes().vec()};
}

// Runs the operator on tensors without data.
std::vector<TensorType> run_without_data(const OpCall& op) {
  const c10::InferenceMode no_autograd;
  const AtenCall call(op, AtenCall::Form::kFunctional);
  std::vector<c10::IValue> stack;
  call.fill(stack, [&](size_t i) { return without_data(op.input(i)); });
  for (c10::IValue& value : stack) {
    if (value.isDevice()) value = c10::Device(c10::kMeta);
    // Without data no random numbers are drawn, and the code takes no
    // generator.
    if (value.isGenerator()) value = c10::IValue();
  }
  call.handle().callBoxed(stack);
  std::vector<TensorType> types;
  for_each_result(stack, [&](const at::Tensor& result) {
    types.push_back(type_of(result));
  });
  return types;
}

// Everything that the types of the operator's results depend on, as bytes.
class Key {
 public:
  template <typename T>
  void add(const T& value) {
    if constexpr (std::is_arithmetic_v<T> || std::is_enum_v<T>) {
      bytes_.append(reinterpret_cast<const char*>(&value), sizeof(value));
    } else if constexpr (std::is_same_v<T, std::complex<double>>) {
      add(value.real());
      add(value.imag());
    } else if constexpr (std::is_same_v<T, graph::TensorArgument>) {
      add(value.input);
    } else if constexpr (std::is_same_v<T, graph::TensorListArgument>) {
      add(value.inputs);
    } else if constexpr (!std::is_same_v<T, std::monostate>) {
      add(value.size());
      for (const auto& item : value) add(item);
    }
  }
  void add(const graph::Argument& argument) {
    add(argument.index());
    std::visit([this](const auto& value) { add(value); }, argument);
  }
  [[nodiscard]] std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

std::string key_of(const OpCall& op) {
  Key key;
  key.add(op.attribute<std::string>("operator"));
  key.add(op.attribute<std::string>("overload"));
  key.add(op.attribute<graph::Arguments>("arguments").values);
  for (size_t i = 0; i < op.num_inputs(); ++i) {
    key.add(op.has_input(i));
    if (!op.has_input(i)) continue;
    const graph::Tensor& input = op.input(i);
    key.add(input.dtype);
    key.add(input.shape);
    key.add(input.strides);
  }
  return key.take();
}

// Caches the types for PyTorch's own operators: much of the code that runs them
// without data is Python, and a model asks for most of its layers several
// times. Other operators are not cached, as they may be redefined under the
// same name.
class Answers {
 public:
  std::optional<std::vector<TensorType>> find(const std::string& key) {
    const std::scoped_lock lock(mutex_);
    const auto found = types_.find(key);
    if (found == types_.end()) return std::nullopt;
    return found->second;
  }
  void add(std::string key, const std::vector<TensorType>& types) {
    const std::scoped_lock lock(mutex_);
    if (types_.size() >= kMost) types_.clear();
    types_.insert_or_assign(std::move(key), types);
  }

 private:
  static constexpr size_t kMost = 4096;

  std::mutex mutex_;
  std::unordered_map<std::string, std::vector<TensorType>> types_;
};

Answers& answers() {
  static Answers instance;
  return instance;
}

}  // namespace

std::vector<TensorType> infer_aten_types(const OpCall& op) {
  const auto& name = op.attribute<std::string>("operator");
  if (std::ranges::find(kOtherOnCpu, name) != kOtherOnCpu.end()) {
    return {TensorType::unknown()};
  }
  const bool keeps = name.starts_with("aten::");
  std::string key;
  if (keeps) {
    key = key_of(op);
    if (auto known = answers().find(key)) return std::move(*known);
  }
  std::vector<TensorType> types{TensorType::unknown()};
  try {
    types = run_without_data(op);
  } catch (const c10::NotImplementedError&) {
    // The operator, or an operator that it calls, has no code for this.
  } catch (const c10::Error& error) {
    op.require(false, name,
               " accepts its arguments: ", error.what_without_backtrace());
  } catch (const InternalError&) {
    throw;
  } catch (const std::exception& error) {
    // PyTorch's code for this operator is Python.
    const std::string_view problem = error.what();
    op.require(
        problem.starts_with("NotImplementedError"), name,
        " accepts its arguments: ", problem.substr(0, problem.find('\n')));
  }
  if (keeps) answers().add(std::move(key), types);
  return types;
}

}  // namespace popsim::ops
