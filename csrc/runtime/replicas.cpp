#include "runtime/replicas.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "ops/op_def.h"

namespace popsim::runtime {
namespace {

using graph::Op;
using graph::Phase;
using graph::TensorId;
using graph::TensorKind;

// By replica, the first replica of its group.
Groups firsts_of(const Groups& groups) {
  Groups firsts;
  for (const int32_t group : groups) {
    const auto found = std::ranges::find(groups, group);
    firsts.push_back(static_cast<int32_t>(found - groups.begin()));
  }
  return firsts;
}

// By replica, the first replica that is with it in both.
Groups common(const Groups& one, const Groups& other) {
  std::vector<std::pair<int32_t, int32_t>> pairs;
  Groups firsts;
  for (size_t r = 0; r < one.size(); ++r) {
    pairs.emplace_back(one[r], other[r]);
    const auto found = std::ranges::find(pairs, pairs.back());
    firsts.push_back(static_cast<int32_t>(found - pairs.begin()));
  }
  return firsts;
}

// Finds which replicas need an op of the update to run for themselves. Two
// replicas do not if they share the variables that the op writes, or, if it
// writes none, all values that it reads.
class Updaters {
 public:
  Updaters(const graph::Graph& graph, const Replicas& replicas,
           const memory::Instances& instances)
      : graph_(graph),
        together_(static_cast<size_t>(replicas.count), 0),
        apart_(together_.size()),
        firsts_(graph.tensors().size()),
        holders_(graph.tensors().size()) {
    std::iota(apart_.begin(), apart_.end(), 0);
    for (size_t i = 0; i < firsts_.size(); ++i) {
      const TensorKind kind = graph.tensors()[i].kind;
      holders_[i] = instances[i].empty() ? together_ : firsts_of(instances[i]);
      if (!instances[i].empty()) {
        firsts_[i] = holders_[i];
      } else if (kind == TensorKind::kInput) {
        firsts_[i] = apart_;
      } else {
        firsts_[i] = together_;
      }
    }
    // The values of a micro-batch, which the update may read.
    for (const Op& op : graph.ops()) {
      if (op.phase != Phase::kForward && op.phase != Phase::kBackward) continue;
      for (const TensorId id : op.outputs) {
        if (id != graph::kNoTensor && !is_variable(id)) firsts(id) = apart_;
      }
    }
  }

  // Call it for the ops of the update, in their order.
  Groups add(const Op& op) {
    if (op.kind == "all_reduce") return add_reduction(op);
    if (ops::find_op(op.kind).family == "host") return apart_;
    Groups read = together_;
    Groups written = together_;
    bool writes = false;
    for (const TensorId id : op.inputs) {
      if (id != graph::kNoTensor) read = common(read, firsts(id));
    }
    for (const TensorId id : op.outputs) {
      if (id == graph::kNoTensor || !is_variable(id)) continue;
      writes = true;
      written = common(written, holders_[static_cast<size_t>(graph_.root(id))]);
    }
    const Groups own = writes ? written : read;
    for (const TensorId id : op.outputs) {
      if (id != graph::kNoTensor && !is_variable(id)) firsts(id) = own;
    }
    return own;
  }

 private:
  // The first replica of each group gets what all replicas of it have.
  Groups add_reduction(const Op& op) {
    auto group = ops::OpCall(graph_, op)
                     .attribute<std::vector<int64_t>>("groups")
                     .begin();
    for (const TensorId id : op.outputs) {
      Groups own(together_.size());
      for (int32_t& of_replica : own) {
        of_replica = static_cast<int32_t>(*group++);
      }
      firsts(id) = firsts_of(own);
    }
    return together_;
  }

  Groups& firsts(TensorId id) {
    return firsts_[static_cast<size_t>(graph_.root(id))];
  }
  [[nodiscard]] bool is_variable(TensorId id) const {
    return graph_.tensor(graph_.root(id)).kind == TensorKind::kVariable;
  }

  const graph::Graph& graph_;
  Groups together_;
  Groups apart_;
  // By TensorId, then by replica: the first replica with the same value.
  std::vector<Groups> firsts_;
  // The same for the memory of variables.
  std::vector<Groups> holders_;
};

void check_groups(const Groups& groups, const Replicas& replicas) {
  check_internal(std::ssize(groups) == replicas.count,
                 "replicas: ", groups.size(), " groups for ", replicas.count,
                 " replicas");
  int32_t next = 0;
  for (const int32_t group : groups) {
    check_internal(group >= 0 && group <= next,
                   "replicas: groups must be numbered by their first replicas");
    next = std::max(next, group + 1);
  }
}

}  // namespace

int64_t Replicas::num_inputs() const {
  return input_groups.empty() ? count : std::ranges::max(input_groups) + 1;
}

void check_replicas(const graph::Graph& graph, const Replicas& replicas) {
  check_internal(replicas.count >= 1, "replicas: the count is ",
                 replicas.count);
  if (!replicas.input_groups.empty()) {
    check_groups(replicas.input_groups, replicas);
  }
  for (const auto& [id, groups] : replicas.variable_groups) {
    check_groups(groups, replicas);
    check_internal(graph.tensor(id).kind == TensorKind::kVariable,
                   "replicas: '", graph.tensor(id).name,
                   "' is not a variable and cannot have groups");
  }
}

memory::Instances find_instances(const graph::Graph& graph,
                                 const Replicas& replicas) {
  memory::Instances instances(graph.tensors().size());
  if (replicas.count == 1) return instances;
  Groups own(static_cast<size_t>(replicas.count));
  std::iota(own.begin(), own.end(), 0);
  for (const Op& op : graph.ops()) {
    if (op.phase != Phase::kForward && op.phase != Phase::kBackward) continue;
    for (const TensorId id : op.outputs) {
      if (id == graph::kNoTensor) continue;
      const TensorId root = graph.root(id);
      if (graph.tensor(root).kind == TensorKind::kVariable) {
        instances[static_cast<size_t>(root)] = own;
      }
    }
  }
  for (const auto& [id, groups] : replicas.variable_groups) {
    std::vector<int32_t>& of_variable = instances[static_cast<size_t>(id)];
    if (of_variable.empty()) of_variable = groups;
  }
  return instances;
}

Groups first_users(const std::vector<int32_t>& instances) {
  if (instances.empty()) return {0};
  Groups users;
  for (size_t r = 0; r < instances.size(); ++r) {
    // Instances are numbered by their first replicas.
    if (instances[r] == std::ssize(users)) {
      users.push_back(static_cast<int32_t>(r));
    }
  }
  return users;
}

std::vector<Groups> find_updaters(const graph::Graph& graph,
                                  const memory::Block& update,
                                  const Replicas& replicas,
                                  const memory::Instances& instances) {
  Updaters updaters(graph, replicas, instances);
  std::vector<Groups> found;
  for (const int64_t index : update.ops) {
    found.push_back(updaters.add(graph.ops()[static_cast<size_t>(index)]));
  }
  return found;
}

}  // namespace popsim::runtime
