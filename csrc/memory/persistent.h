// The offsets of all tensors that keep their memory in all runs.
//
// The replicas of a program share constants and most variables. Of the others
// there are several instances, one after the other.
#pragma once

#include <cstdint>
#include <vector>

#include "graph/graph.h"

namespace popsim::memory {

struct PersistentPlan {
  // Bytes, by TensorId: of the first instance; -1: not in this memory.
  std::vector<int64_t> offsets;
  std::vector<int64_t> num_instances;  // by TensorId
  std::vector<int64_t> strides;        // bytes from one instance to the next
  int64_t bytes = 0;
  // The same for tensors in the memory of the program beside this one; empty if
  // there is none.
  std::vector<int64_t> offsets_beside;
};

// By TensorId, then by replica: the instance of a variable that the replica
// uses, counted from 0. Empty for what all replicas share.
using Instances = std::vector<std::vector<int32_t>>;

// The plan of another program whose first tensors are those of the program; of
// these, the program keeps none that the other one keeps already.
struct Beside {
  const PersistentPlan* plan = nullptr;  // null: there is no other program
  int64_t num_tensors = 0;               // that are the same
};

// Places constants, variables, and the outputs of setup ops.
[[nodiscard]] PersistentPlan plan_persistent(const graph::Graph& graph,
                                             const Instances& instances,
                                             const Beside& beside);

}  // namespace popsim::memory
