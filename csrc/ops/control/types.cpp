#include "ops/control/types.h"

#include "ops/work.h"

namespace popsim::ops {
namespace {

std::vector<TensorType> types_of(const graph::Graph& body,
                                 const std::vector<graph::TensorId>& ids) {
  std::vector<TensorType> types;
  for (const graph::TensorId id : ids) {
    const graph::Tensor& tensor = body.tensor(id);
    types.push_back({tensor.dtype, tensor.shape});
  }
  return types;
}

}  // namespace

std::vector<BodyTypes> body_types(const OpCall& op, size_t count) {
  op.require(op.op().bodies.size() == count, "the op has ", count,
             count == 1 ? " body" : " bodies");
  for (size_t i = 0; i < op.num_inputs(); ++i) op.require_contiguous(i);
  std::vector<BodyTypes> types;
  for (const auto& body : op.op().bodies) {
    types.push_back({types_of(*body, graph::inputs_of(*body)),
                     types_of(*body, graph::results_of(*body))});
  }
  return types;
}

std::vector<graph::Work> work_of_body(const graph::Graph& body, int64_t times) {
  std::vector<graph::Work> all;
  for (const graph::Op& op : body.ops()) {
    if (op.kind == graph::kYield) continue;
    for (const graph::Work& work : work_of(OpView(body, op))) {
      all.push_back(graph::repeated(work, times));
    }
  }
  return all;
}

}  // namespace popsim::ops
