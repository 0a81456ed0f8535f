#include "ops/aten/call.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ScalarOps.h>

namespace popsim::ops {
namespace {

using graph::Argument;
using graph::TensorArgument;
using graph::TensorListArgument;

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

// Boxes a value that is known at compile time as the type that the schema
// needs.
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
  c10::IValue operator()(const std::complex<double>& value) const {
    const c10::complex<double> boxed(value);
    if (is_tensor()) return wrapped_number(boxed);
    return boxed;
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
  // A Python number where the schema has a tensor: it does not affect the dtype
  // of the result.
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

c10::OperatorHandle find_operator(const OpCall& op, AtenCall::Form form) {
  const bool out = form == AtenCall::Form::kOut && op.has_attribute("out");
  const auto& name = op.attribute<std::string>("operator");
  const auto& overload = op.attribute<std::string>(out ? "out" : "overload");
  const auto found = c10::Dispatcher::singleton().findSchema({name, overload});
  op.require(found.has_value(), "operator ", name, ".", overload, " exists");
  for (const c10::Argument& argument : found->schema().arguments()) {
    const c10::AliasInfo* alias = argument.alias_info();
    op.require(
        argument.is_out() == out || alias == nullptr || !alias->isWrite(),
        "operator ", name, ".", overload, " only reads its arguments");
  }
  return *found;
}

}  // namespace

AtenCall::AtenCall(const OpCall& op, Form form)
    : handle_(find_operator(op, form)) {
  const auto& values = op.attribute<graph::Arguments>("arguments").values;
  size_t next = 0;
  for (const c10::Argument& argument : handle_.schema().arguments()) {
    if (argument.is_out()) {
      out_positions_.push_back(template_.size());
      template_.emplace_back();
      continue;
    }
    op.require(next < values.size(), "argument '", argument.name(),
               "' is given");
    bind(op, values[next++], argument);
  }
  op.require(next == values.size(), "the op has ", next, " arguments");
}

void AtenCall::bind(const OpCall& op, const Argument& value,
                    const c10::Argument& argument) {
  if (is_generator(argument)) {
    generator_ = at::detail::createCPUGenerator();
    template_.emplace_back(*generator_);
    return;
  }
  if (const auto* tensor = std::get_if<TensorArgument>(&value)) {
    const auto input = static_cast<size_t>(tensor->input);
    op.require(op.has_input(input), "input ", tensor->input, " is present");
    tensors_.push_back({template_.size(), input});
  } else if (const auto* list = std::get_if<TensorListArgument>(&value)) {
    bind_list(op, *list, argument);
  }
  template_.push_back(std::visit(Boxer(*argument.type()), value));
}

void AtenCall::bind_list(const OpCall& op, const TensorListArgument& list,
                         const c10::Argument& argument) {
  const auto* type = strip_optional(*argument.type()).castRaw<c10::ListType>();
  op.require(type != nullptr, "argument '", argument.name(), "' is a list");
  TensorListSlot slot{
      template_.size(),
      {},
      type->getElementType()->kind() == c10::TypeKind::OptionalType};
  for (const int64_t i : list.inputs) {
    if (i < 0 && slot.optional_elements) {
      slot.inputs.push_back(std::nullopt);
      continue;
    }
    op.require(op.has_input(static_cast<size_t>(i)), "input ", i,
               " is present");
    slot.inputs.push_back(static_cast<size_t>(i));
  }
  tensor_lists_.push_back(std::move(slot));
}

}  // namespace popsim::ops
