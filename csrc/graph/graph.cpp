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

std::vector<TensorId> inputs_of(const Graph& body) {
  std::vector<TensorId> inputs;
  for (size_t i = 0; i < body.tensors().size(); ++i) {
    if (body.tensors()[i].kind == TensorKind::kInput) {
      inputs.push_back(static_cast<TensorId>(i));
    }
  }
  return inputs;
}

const std::vector<TensorId>& results_of(const Graph& body) {
  check_internal(!body.ops().empty() && body.ops().back().kind == kYield,
                 "graph: the last op of a body is not '", kYield, "'");
  return body.ops().back().inputs;
}

}  // namespace popsim::graph
