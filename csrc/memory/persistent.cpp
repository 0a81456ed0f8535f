#include "memory/persistent.h"

#include <algorithm>

#include "base/numbers.h"
#include "memory/arena.h"

namespace popsim::memory {
namespace {

using graph::TensorId;
using graph::TensorKind;

std::vector<bool> find_persistent(const graph::Graph& graph) {
  std::vector<bool> persistent(graph.tensors().size());
  for (size_t i = 0; i < persistent.size(); ++i) {
    const TensorKind kind = graph.tensors()[i].kind;
    persistent[i] =
        kind == TensorKind::kConstant || kind == TensorKind::kVariable;
  }
  for (const graph::Op& op : graph.ops()) {
    if (op.phase != graph::Phase::kSetup) continue;
    for (const TensorId id : op.outputs) {
      if (id == graph::kNoTensor) continue;
      persistent[static_cast<size_t>(graph.root(id))] = true;
    }
  }
  return persistent;
}

}  // namespace

PersistentPlan plan_persistent(const graph::Graph& graph,
                               const Instances& instances) {
  const std::vector<bool> persistent = find_persistent(graph);
  PersistentPlan plan;
  for (size_t i = 0; i < persistent.size(); ++i) {
    plan.offsets.push_back(persistent[i] ? plan.bytes : -1);
    plan.num_instances.push_back(
        instances[i].empty() ? 1 : std::ranges::max(instances[i]) + 1);
    plan.strides.push_back(round_up(graph.tensors()[i].bytes(), kAlignment));
    if (persistent[i]) {
      plan.bytes += plan.strides.back() * plan.num_instances.back();
    }
  }
  return plan;
}

}  // namespace popsim::memory
