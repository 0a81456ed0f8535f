#include "machine/cost/common.h"

#include "machine/formulas/rearrange.h"

namespace popsim::machine {

using graph::kNoTensor;
using graph::TensorId;

TensorId largest_tensor(const ops::OpView& op) {
  TensorId largest = kNoTensor;
  for (const auto* ids : {&op.op().outputs, &op.op().inputs}) {
    for (const TensorId id : *ids) {
      if (id == kNoTensor) continue;
      if (largest == kNoTensor ||
          op.graph().tensor(id).numel() > op.graph().tensor(largest).numel()) {
        largest = id;
      }
    }
  }
  return largest;
}

OpCost tensor_pass(CostContext& context, const ops::OpView& op, TensorId id,
                   double cycles) {
  const DType dtype = op.graph().tensor(id).dtype;
  const int64_t numbers = is_complex(dtype) ? 2 : 1;
  return elementwise(numbers * context.layouts.elements_per_tile(id),
                     pass(cycles, is_half(dtype)));
}

OpCost reduction_of(CostContext& context, const ops::OpView& op, TensorId id,
                    int64_t results) {
  const graph::Tensor& tensor = op.graph().tensor(id);
  return tensor_reduction({context.layouts.elements_per_tile(id),
                           context.layouts.of_view(id).tiles, results,
                           device_size(tensor.dtype)});
}

OpCost bring(CostContext& context, const ops::OpView& op, TensorId id,
             const Layout& layout) {
  const Layout& own = context.layouts.of(id);
  if (own.id == layout.id) return {};
  const graph::Tensor& tensor = op.graph().tensor(id);
  const int64_t bytes = tensor.numel() * device_size(tensor.dtype);
  return move(static_cast<double>(ceil_div(bytes, layout.tiles)));
}

bool repeats_elements(const ops::OpView& op, TensorId id) {
  const graph::Graph& graph = op.graph();
  return graph.tensor(id).numel() > graph.tensor(graph.root(id)).numel();
}

void follow(CostContext& context, const ops::OpView& op, TensorId id) {
  if (repeats_elements(op, id)) return;
  const graph::Tensor& source = op.graph().tensor(id);
  const Layout layout = context.layouts.of_view(id);
  for (const TensorId output : op.op().outputs) {
    if (output == kNoTensor) continue;
    const graph::Tensor& tensor = op.graph().tensor(output);
    if (tensor.numel() != source.numel()) continue;
    Layout own = layout;
    own.bytes_per_tile =
        ceil_div(own.bytes_per_tile * device_size(tensor.dtype),
                 device_size(source.dtype));
    context.layouts.place(output, own);
  }
}

}  // namespace popsim::machine
