// Shapes and element types of the long tail: what the operator itself says of
// tensors without data.
#include <ATen/EmptyTensor.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <exception>

#include "ops/aten/call.h"
#include "ops/operands/aten_types.h"

namespace popsim::ops {
namespace {

// Their auxiliary results have other shapes on the CPU than without data.
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
    // Nothing is drawn, and code without data takes none.
    if (value.isGenerator()) value = c10::IValue();
  }
  call.handle().callBoxed(stack);
  std::vector<TensorType> types;
  for_each_result(stack, [&](const at::Tensor& result) {
    types.push_back(type_of(result));
  });
  return types;
}

}  // namespace

std::vector<TensorType> infer_aten_types(const OpCall& op) {
  const auto& name = op.attribute<std::string>("operator");
  if (std::ranges::find(kOtherOnCpu, name) == kOtherOnCpu.end()) {
    try {
      return run_without_data(op);
    } catch (const c10::NotImplementedError&) {
      // The operator, or one that it is made of, has no code for this.
    } catch (const c10::Error& error) {
      op.require(false, name,
                 " takes its arguments: ", error.what_without_backtrace());
    } catch (const InternalError&) {
      throw;
    } catch (const std::exception&) {
      // PyTorch's code for it is Python, and does not take all that it takes
      // with data.
    }
  }
  return {TensorType::unknown()};
}

}  // namespace popsim::ops
