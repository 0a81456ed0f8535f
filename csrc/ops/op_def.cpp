#include "ops/op_def.h"

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

const graph::Tensor& OpView::input(size_t i) const {
  return graph_.tensor(input_id(i));
}

const graph::Tensor& OpView::output(size_t i) const {
  return graph_.tensor(output_id(i));
}

graph::TensorId OpView::input_id(size_t i) const {
  check_internal(has_input(i), op_.kind, " '", op_.name, "': input ", i,
                 " is missing");
  return op_.inputs[i];
}

graph::TensorId OpView::output_id(size_t i) const {
  check_internal(i < op_.outputs.size(), op_.kind, " '", op_.name, "': output ",
                 i, " is missing");
  return op_.outputs[i];
}

void check_types(const OpView& op) {
  const std::vector<TensorType> expected = find_op(op.op().kind).shape(op);
  check_internal(expected.size() == op.num_outputs(), op.op().kind, " '",
                 op.op().name, "' has ", op.num_outputs(),
                 " outputs, its shape rule gives ", expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    if (op.op().outputs[i] == graph::kNoTensor) continue;
    const graph::Tensor& out = op.output(i);
    check_internal(
        out.dtype == expected[i].dtype && out.shape == expected[i].shape,
        op.op().kind, " '", op.op().name, "': output ", i, " is ",
        name_of(out.dtype), to_string(out.shape), ", its shape rule gives ",
        name_of(expected[i].dtype), to_string(expected[i].shape));
  }
}

}  // namespace popsim::ops
