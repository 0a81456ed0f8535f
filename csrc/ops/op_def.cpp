#include "ops/op_def.h"

#include <algorithm>

namespace popsim::ops {

bool is_empty_list(const graph::Attribute& attribute) {
  return std::visit(
      [](const auto& value) {
        if constexpr (is_list<std::decay_t<decltype(value)>>) {
          return value.empty();
        }
        return false;
      },
      attribute);
}

const graph::Tensor& OpCall::input(size_t i) const {
  return graph_.tensor(input_id(i));
}

graph::TensorId OpCall::input_id(size_t i) const {
  require(has_input(i), "input ", i, " is present");
  return op_.inputs[i];
}

const graph::Attribute& OpCall::find_attribute(std::string_view name) const {
  const auto given = op_.attributes.find(name);
  if (given != op_.attributes.end()) return given->second;
  const AttributeRule* rule = find_schema(op_.kind).attribute(name);
  require(rule != nullptr && rule->default_value.has_value(), "attribute '",
          name, "' is given");
  return *rule->default_value;
}

void OpCall::require_rank(size_t i, size_t rank) const {
  require(input(i).shape.size() == rank, "input ", i, " has ", rank, " axes");
}

void OpCall::require_shape(size_t i, const Shape& shape) const {
  require(input(i).shape == shape, "input ", i, " has shape ",
          to_string(shape));
}

void OpCall::require_contiguous(size_t i) const {
  require(input(i).contiguous(), "input ", i, " is contiguous");
}

void OpCall::require_one_dtype() const {
  const graph::Tensor* first = nullptr;
  for (size_t i = 0; i < num_inputs(); ++i) {
    if (!has_input(i)) continue;
    if (first == nullptr) first = &input(i);
    require(input(i).dtype == first->dtype, "all inputs have the same dtype");
  }
}

void OpCall::require_broadcasts(size_t i, const Shape& shape) const {
  const Shape& given = input(i).shape;
  bool fits = given.size() <= shape.size();
  for (size_t k = 0; fits && k < given.size(); ++k) {
    fits = given[k] == 1 || given[k] == shape[shape.size() - given.size() + k];
  }
  require(fits, "input ", i, " broadcasts to ", to_string(shape));
}

void OpCall::fail(const std::string& rule) const {
  std::string given;
  for (const graph::TensorId id : op_.inputs) {
    if (!given.empty()) given += ", ";
    if (id == graph::kNoTensor) {
      given += "none";
    } else {
      const graph::Tensor& tensor = graph_.tensor(id);
      given += join(name_of(tensor.dtype), to_string(tensor.shape));
    }
  }
  throw OpError(join(op_, ": must hold: ", rule, ", got (", given, ")"));
}

const graph::Tensor& OpView::output(size_t i) const {
  return graph().tensor(output_id(i));
}

graph::TensorId OpView::output_id(size_t i) const {
  require(has_output(i), "output ", i, " is present");
  return op().outputs[i];
}

}  // namespace popsim::ops
