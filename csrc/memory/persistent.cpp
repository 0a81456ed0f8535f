#include "memory/persistent.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
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
                               const Instances& instances,
                               const Beside& beside) {
  const std::vector<bool> persistent = find_persistent(graph);
  PersistentPlan plan;
  for (size_t i = 0; i < persistent.size(); ++i) {
    plan.num_instances.push_back(
        instances[i].empty() ? 1 : std::ranges::max(instances[i]) + 1);
    plan.strides.push_back(round_up(graph.tensors()[i].bytes(), kAlignment));
    const bool is_beside = persistent[i] &&
                           std::cmp_less(i, beside.num_tensors) &&
                           beside.plan->offsets[i] >= 0;
    if (is_beside) {
      check_internal(beside.plan->strides[i] == plan.strides[i] &&
                         beside.plan->num_instances[i] == plan.num_instances[i],
                     "memory: two programs share '", graph.tensors()[i].name,
                     "', which has another size in each");
    }
    if (beside.plan != nullptr) {
      plan.offsets_beside.push_back(is_beside ? beside.plan->offsets[i] : -1);
    }
    const bool is_own = persistent[i] && !is_beside;
    plan.offsets.push_back(is_own ? plan.bytes : -1);
    if (is_own) plan.bytes += plan.strides.back() * plan.num_instances.back();
  }
  return plan;
}

}  // namespace popsim::memory
