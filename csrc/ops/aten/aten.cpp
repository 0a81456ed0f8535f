// The op for the long tail: any ATen operator, called through the dispatcher.
//
// The arguments are boxed once, when the program is compiled; run() only drops
// the tensors into their places. Where the operator has an out= form, it writes
// straight into the arena; otherwise its results are copied there.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ScalarOps.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <optional>

#include "ops/aten/seed.h"
#include "ops/op_def.h"
#include "ops/operands/aten_types.h"

namespace popsim::ops {
namespace {

using graph::Argument;
using graph::TensorArgument;
using graph::TensorId;
using graph::TensorListArgument;

// A place in the stack that a tensor goes into on each run.
struct TensorSlot {
  size_t position;
  TensorId id;
};

struct TensorListSlot {
  size_t position;
  std::vector<TensorId> ids;  // kNoTensor: None
  bool optional_elements;
};

c10::IValue empty_list(const c10::Type& type) {
  const auto& list = type.expectRef<c10::ListType>();
  switch (list.getElementType()->kind()) {
    case c10::TypeKind::FloatType:
      return std::vector<double>{};
    case c10::TypeKind::BoolType:
      return c10::List<bool>{};
    default:
      return std::vector<int64_t>{};
  }
}

const c10::Type& strip_optional(const c10::Type& type) {
  if (const auto* optional = type.castRaw<c10::OptionalType>()) {
    return *optional->getElementType();
  }
  return type;
}

// Boxes a value that is known at compile time as the type the schema wants.
class Boxer {
 public:
  explicit Boxer(const c10::Type& type) : type_(strip_optional(type)) {}

  c10::IValue operator()(std::monostate) const { return {}; }
  c10::IValue operator()(bool value) const { return value; }
  c10::IValue operator()(int64_t value) const {
    if (type_.kind() == c10::TypeKind::FloatType) {
      return static_cast<double>(value);
    }
    if (is_list()) return std::vector<int64_t>{value};
    if (is_tensor()) return wrapped_number(value);
    return value;
  }
  c10::IValue operator()(double value) const {
    if (is_tensor()) return wrapped_number(value);
    return value;
  }
  c10::IValue operator()(const std::string& value) const {
    if (type_.kind() == c10::TypeKind::DeviceObjType) return c10::Device(value);
    return value;
  }
  c10::IValue operator()(const std::vector<bool>& values) const {
    if (values.empty() && is_list()) return empty_list(type_);
    c10::List<bool> list;
    for (const bool value : values) list.push_back(value);
    return list;
  }
  c10::IValue operator()(const std::vector<int64_t>& values) const {
    if (values.empty() && is_list()) return empty_list(type_);
    if (is_list() &&
        type_.expectRef<c10::ListType>().getElementType()->kind() ==
            c10::TypeKind::FloatType) {
      return std::vector<double>(values.begin(), values.end());
    }
    return values;
  }
  c10::IValue operator()(const std::vector<double>& values) const {
    return values;
  }
  c10::IValue operator()(const TensorArgument&) const { return {}; }
  c10::IValue operator()(const TensorListArgument&) const { return {}; }

 private:
  [[nodiscard]] bool is_list() const {
    return type_.kind() == c10::TypeKind::ListType;
  }
  [[nodiscard]] bool is_tensor() const {
    return type_.kind() == c10::TypeKind::TensorType;
  }
  // A Python number where the schema has a tensor: it does not decide the
  // element type of the result.
  static at::Tensor wrapped_number(const c10::Scalar& value) {
    at::Tensor number = c10::scalar_to_tensor(value);
    number.unsafeGetTensorImpl()->set_wrapped_number(true);
    return number;
  }

  const c10::Type& type_;
};

bool is_generator(const c10::Argument& argument) {
  return strip_optional(*argument.type()).kind() ==
         c10::TypeKind::GeneratorType;
}

class AtenKernel final : public Kernel {
 public:
  explicit AtenKernel(const OpView& op)
      : handle_(c10::Dispatcher::singleton().findSchemaOrThrow(
            op.attribute<std::string>("operator").c_str(),
            op.attribute<std::string>("overload").c_str())),
        outputs_(op.op().outputs),
        writes_outputs_(op.attribute<bool>("out")),
        stream_(op.has_attribute("stream") ? op.attribute<int64_t>("stream")
                                           : op.index()) {
    bind_arguments(op);
    stack_.reserve(template_.size() + outputs_.size());
  }

  std::vector<TensorId> at_tensors() const override {
    std::vector<TensorId> ids;
    for (const TensorSlot& slot : tensors_) ids.push_back(slot.id);
    for (const TensorListSlot& slot : tensor_lists_) {
      for (const TensorId id : slot.ids) {
        if (id != graph::kNoTensor) ids.push_back(id);
      }
    }
    for (const TensorId id : outputs_) {
      if (id != graph::kNoTensor) ids.push_back(id);
    }
    return ids;
  }

  void run(const RunContext& context) override {
    fill_stack(context);
    handle_.callBoxed(stack_);
    if (!writes_outputs_) store_results(context);
    stack_.clear();
  }

 private:
  void bind_arguments(const OpView& op) {
    const auto& values = op.attribute<graph::Arguments>("arguments").values;
    const auto& schema = handle_.schema().arguments();
    size_t position = 0;
    for (const c10::Argument& argument : schema) {
      template_.emplace_back(bind(op, values, argument, position));
      ++position;
    }
  }

  c10::IValue bind(const OpView& op, const std::vector<Argument>& values,
                   const c10::Argument& argument, size_t position) {
    if (argument.is_out()) {
      // out= arguments come last, in the order of the results.
      const size_t first_out = handle_.schema().arguments().size() -
                               handle_.schema().returns().size();
      tensors_.push_back({position, op.output_id(position - first_out)});
      return {};
    }
    check_internal(position < values.size(), "aten '", op.op().name,
                   "': argument '", argument.name(), "' is missing");
    const Argument& value = values[position];
    if (is_generator(argument)) {
      generator_ = at::detail::createCPUGenerator();
      return *generator_;
    }
    if (const auto* tensor = std::get_if<TensorArgument>(&value)) {
      tensors_.push_back(
          {position, op.input_id(static_cast<size_t>(tensor->input))});
    } else if (const auto* list = std::get_if<TensorListArgument>(&value)) {
      bind_list(op, *list, argument, position);
    }
    return std::visit(Boxer(*argument.type()), value);
  }

  void bind_list(const OpView& op, const TensorListArgument& list,
                 const c10::Argument& argument, size_t position) {
    std::vector<TensorId> ids;
    for (const int64_t i : list.inputs) {
      ids.push_back(i < 0 ? graph::kNoTensor
                          : op.input_id(static_cast<size_t>(i)));
    }
    const c10::Type& type = strip_optional(*argument.type());
    const bool optional_elements =
        type.expectRef<c10::ListType>().getElementType()->kind() ==
        c10::TypeKind::OptionalType;
    tensor_lists_.push_back({position, std::move(ids), optional_elements});
  }

  void fill_stack(const RunContext& context) {
    stack_ = template_;
    for (const TensorSlot& slot : tensors_) {
      stack_[slot.position] = context.tensor(slot.id);
    }
    for (const TensorListSlot& slot : tensor_lists_) {
      stack_[slot.position] = boxed_list(context, slot);
    }
    if (generator_) {
      generator_->set_current_seed(
          mix_seed(context.seed, static_cast<uint64_t>(stream_),
                   static_cast<uint64_t>(context.cursor.step)));
    }
  }

  static c10::IValue boxed_list(const RunContext& context,
                                const TensorListSlot& slot) {
    if (!slot.optional_elements) {
      c10::List<at::Tensor> list;
      for (const TensorId id : slot.ids) list.push_back(context.tensor(id));
      return list;
    }
    c10::List<std::optional<at::Tensor>> list;
    for (const TensorId id : slot.ids) {
      if (id == graph::kNoTensor) {
        list.push_back(std::nullopt);
      } else {
        list.push_back(context.tensor(id));
      }
    }
    return list;
  }

  void store_results(const RunContext& context) {
    size_t result = 0;
    const auto store = [&](const at::Tensor& value) {
      const TensorId id = outputs_.at(result++);
      if (id != graph::kNoTensor) context.tensor(id).copy_(value);
    };
    for (const c10::IValue& value : stack_) {
      if (value.isTensorList()) {
        for (const at::Tensor& element : value.toTensorVector()) store(element);
      } else {
        store(value.toTensor());
      }
    }
  }

  c10::OperatorHandle handle_;
  std::vector<TensorId> outputs_;
  bool writes_outputs_;
  int64_t stream_;  // of random numbers, one per random op of the model
  std::optional<at::Generator> generator_;
  std::vector<c10::IValue> template_;
  std::vector<TensorSlot> tensors_;
  std::vector<TensorListSlot> tensor_lists_;
  std::vector<c10::IValue> stack_;
};

// Shapes of the long tail are those that PyTorch gave while tracing.
std::vector<TensorType> traced_types(const OpView& op) {
  std::vector<TensorType> types;
  for (size_t i = 0; i < op.num_outputs(); ++i) {
    if (op.op().outputs[i] == graph::kNoTensor) {
      types.push_back({});
      continue;
    }
    types.push_back({op.output(i).dtype, op.output(i).shape});
  }
  return types;
}

}  // namespace

extern const OpDef kAten{
    .name = "aten",
    .schema =
        "aten(Tensor?[] inputs, *, str operator, str overload, "
        "Argument[] arguments, bool out) -> Tensor[]",
    .shape = traced_types,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<AtenKernel>(op);
    },
};

}  // namespace popsim::ops
