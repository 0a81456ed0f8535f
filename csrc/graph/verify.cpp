#include <vector>

#include "base/check.h"
#include "graph/graph.h"

namespace popsim::graph {
namespace {

void verify_view(const Graph& graph, const Tensor& view) {
  check_internal(view.base != kNoTensor &&
                     graph.tensor(view.base).kind != TensorKind::kView,
                 "verify: the base of view '", view.name,
                 "' must be a tensor that owns memory");
  const Tensor& base = graph.tensor(view.base);
  int64_t first = view.offset;
  int64_t last = view.offset;
  for (size_t i = 0; i < view.shape.size(); ++i) {
    const int64_t reach = (view.shape[i] - 1) * view.strides[i];
    (reach < 0 ? first : last) += reach;
  }
  check_internal(view.numel() == 0 || (first >= 0 && last < base.numel()),
                 "verify: view '", view.name, "' reaches outside of its base '",
                 base.name, "' ", popsim::to_string(base.shape));
  check_internal(view.dtype == base.dtype, "verify: view '", view.name,
                 "' has another element type than its base");
}

}  // namespace

void verify(const Graph& graph) {
  for (const Tensor& t : graph.tensors()) {
    check_internal(t.shape.size() == t.strides.size(), "verify: tensor '",
                   t.name, "' has a stride too many or too few");
    if (t.kind == TensorKind::kView) {
      verify_view(graph, t);
    } else {
      check_internal(t.contiguous(), "verify: tensor '", t.name,
                     "' owns memory and must be contiguous");
    }
  }
  std::vector<bool> written(graph.tensors().size());
  for (size_t i = 0; i < written.size(); ++i) {
    written[i] = graph.tensors()[i].kind != TensorKind::kValue &&
                 graph.tensors()[i].kind != TensorKind::kView;
  }
  for (const Op& op : graph.ops()) {
    for (const TensorId id : op.inputs) {
      if (id == kNoTensor) continue;
      check_internal(written[static_cast<size_t>(graph.root(id))],
                     "verify: ", op.kind, " '", op.name, "' reads '",
                     graph.tensor(id).name, "' before it is written");
    }
    for (const TensorId id : op.outputs) {
      if (id == kNoTensor) continue;
      written[static_cast<size_t>(graph.root(id))] = true;
    }
  }
}

}  // namespace popsim::graph
