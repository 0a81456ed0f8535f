#include "machine/estimate/program_costs.h"

#include <algorithm>
#include <cstdint>
#include <limits>

namespace popsim::machine {
namespace {

using graph::kNoTensor;
using graph::TensorId;
using ops::OpView;

OpCost cost_with_bodies(const OpView& op, CostContext& context);

// The bytes of the values of a body on the fullest tile, as they live.
int64_t peak_of(const graph::Graph& body, Layouts& layouts) {
  std::vector<int64_t> last(body.tensors().size(), -1);
  for (size_t i = 0; i < body.ops().size(); ++i) {
    for (const TensorId id : body.ops()[i].inputs) {
      if (id == kNoTensor) continue;
      last[static_cast<size_t>(body.root(id))] = static_cast<int64_t>(i);
    }
  }
  std::vector<std::vector<TensorId>> freed(body.ops().size());
  for (size_t id = 0; id < last.size(); ++id) {
    if (last[id] < 0) continue;
    freed[static_cast<size_t>(last[id])].push_back(static_cast<TensorId>(id));
  }
  int64_t live = 0;
  int64_t peak = 0;
  for (size_t i = 0; i < body.ops().size(); ++i) {
    for (const TensorId id : body.ops()[i].outputs) {
      if (id != kNoTensor) live += layouts.of(id).bytes_per_tile;
    }
    peak = std::max(peak, live);
    for (const TensorId id : freed[i]) {
      if (body.tensor(id).kind == graph::TensorKind::kValue) {
        live -= layouts.of(id).bytes_per_tile;
      }
    }
  }
  return peak;
}

OpCost body_cost(const graph::Graph& body, const CostContext& outer) {
  Layouts layouts(body, outer.tiles);
  CostContext context{outer.device, outer.tiles, outer.proportion, layouts};
  OpCost sum;
  for (const graph::Op& op : body.ops()) {
    sum += cost_with_bodies(OpView(body, op), context);
  }
  sum.temporary_bytes += peak_of(body, layouts);
  sum.plan.clear();
  sum.formula = "bodies";
  return sum;
}

// A loop that only a value ends has a count at least this large.
constexpr int64_t kNoLimit = std::numeric_limits<int32_t>::max();

// A branch counts as its longer body. A loop that a value may end counts as if
// it did not end early, and as one pass if it has no limit.
OpCost cost_with_bodies(const OpView& op, CostContext& context) {
  OpCost cost = cost_of(op, context);
  if (op.op().bodies.empty()) return cost;
  OpCost longest;
  for (const auto& body : op.op().bodies) {
    OpCost one = body_cost(*body, context);
    if (one.cycles() >= longest.cycles()) longest = std::move(one);
  }
  if (op.has_attribute("count")) {
    const auto count = op.attribute<int64_t>("count");
    if (count >= kNoLimit) {
      longest.formula = "bodies, one pass of a loop without a limit";
    } else {
      longest *= static_cast<double>(count);
    }
  }
  longest += cost;
  longest.grade = worse(longest.grade, Grade::kAssumed);
  return longest;
}

// Ops of inference that depend only on weights: the compiler computes them once
// for all runs, as PopART does with constant weights.
std::vector<bool> folded_ops(const graph::Graph& graph,
                             const Settings& settings) {
  std::vector<bool> folded(graph.ops().size());
  if (settings.training) return folded;
  std::vector<bool> varies(graph.tensors().size());
  for (size_t id = 0; id < varies.size(); ++id) {
    varies[id] = graph.tensors()[id].kind == graph::TensorKind::kInput;
  }
  const auto root = [&](TensorId id) {
    return static_cast<size_t>(graph.root(id));
  };
  for (const graph::Op& op : graph.ops()) {
    for (const TensorId id : op.outputs) {
      if (id == kNoTensor) continue;
      const auto kind = graph.tensors()[root(id)].kind;
      if (kind == graph::TensorKind::kVariable) varies[root(id)] = true;
    }
  }
  for (size_t i = 0; i < folded.size(); ++i) {
    const graph::Op& op = graph.ops()[i];
    folded[i] = !op.inputs.empty() && op.bodies.empty() &&
                !op.outputs.empty() && op.kind != "host_call";
    for (const TensorId id : op.inputs) {
      if (id != kNoTensor && varies[root(id)]) folded[i] = false;
    }
    for (const TensorId id : op.outputs) {
      if (id != kNoTensor && !folded[i]) varies[root(id)] = true;
    }
  }
  return folded;
}

}  // namespace

std::vector<OpCost> program_costs(const graph::Graph& graph,
                                  const Settings& settings,
                                  const Places& places, Layouts& layouts) {
  const std::vector<bool> folded = folded_ops(graph, settings);
  std::vector<OpCost> costs;
  costs.reserve(graph.ops().size());
  for (size_t i = 0; i < graph.ops().size(); ++i) {
    const graph::Op& op = graph.ops()[i];
    if (op.phase == graph::Phase::kSetup) {
      costs.emplace_back();
      continue;
    }
    CostContext context{settings.device, settings.compute_tiles(),
                        settings.proportion_of(places.ipu_of_op[i]), layouts};
    costs.push_back(cost_with_bodies(OpView(graph, op), context));
    if (!folded[i]) continue;
    costs.back() = {};
    costs.back().formula = "folded";
  }
  return costs;
}

}  // namespace popsim::machine
