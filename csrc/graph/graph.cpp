#include "graph/graph.h"

#include <algorithm>

#include "base/check.h"

namespace popsim::graph {

TensorId Graph::add(Tensor tensor) {
  tensors_.push_back(std::move(tensor));
  return static_cast<TensorId>(tensors_.size() - 1);
}

void Graph::add(Op op) { ops_.push_back(std::move(op)); }

const Tensor& Graph::tensor(TensorId id) const {
  check_internal(has(id), "graph: no tensor with id ", id);
  return tensors_[static_cast<size_t>(id)];
}

TensorId Graph::root(TensorId id) const {
  const Tensor& t = tensor(id);
  return t.kind == TensorKind::kView ? t.base : id;
}

int32_t Graph::num_stages() const {
  int32_t last = 0;
  for (const Op& op : ops_) last = std::max(last, op.stage);
  return last + 1;
}

}  // namespace popsim::graph
