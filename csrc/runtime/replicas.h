// Replicas: copies of a program that work on different micro-batches and train
// the same weights.
//
// Each replica has memory of its own for the values of its micro-batches, and
// its own instance of each variable that micro-batches change (accumulated
// gradients, running statistics). The replicas share all other variables. A
// weight may also have an instance for each group of replicas.
//
// The update runs once for all replicas, and what concerns the weight of a
// group once for each group.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "graph/graph.h"
#include "memory/live_range.h"
#include "memory/persistent.h"

namespace popsim::runtime {

// The group of each replica. Groups are numbered from 0 in the order of their
// first replicas.
using Groups = std::vector<int32_t>;

struct Replicas {
  int32_t count = 1;
  // Replicas of a group read the same inputs. Empty: each has its own.
  Groups input_groups;
  // The variables that have an instance for each group.
  std::map<graph::TensorId, Groups> variable_groups;

  // The position of a replica's input among those of one micro-batch.
  [[nodiscard]] int64_t input_of(int32_t replica) const {
    return input_groups.empty() ? replica
                                : input_groups[static_cast<size_t>(replica)];
  }
  [[nodiscard]] int64_t num_inputs() const;
};

// Throws InternalError unless the groups fit the number of replicas.
void check_replicas(const graph::Graph& graph, const Replicas& replicas);

// The instances of the variables that each replica uses.
[[nodiscard]] memory::Instances find_instances(const graph::Graph& graph,
                                               const Replicas& replicas);

// The first replica that uses each instance of a variable.
[[nodiscard]] Groups first_users(const std::vector<int32_t>& instances);

// By position in the update block, then by replica: the replica that runs the
// op for it, the first of those for which the op does the same. Ops that give
// something to the host run for each replica.
[[nodiscard]] std::vector<Groups> find_updaters(
    const graph::Graph& graph, const memory::Block& update,
    const Replicas& replicas, const memory::Instances& instances);

}  // namespace popsim::runtime
