// The offsets of all tensors that keep their memory in all runs.
#pragma once

#include <cstdint>
#include <vector>

#include "graph/graph.h"

namespace popsim::memory {

struct PersistentPlan {
  std::vector<int64_t> offsets;  // bytes, by TensorId; -1: not in this memory
  int64_t bytes = 0;
};

// Places constants, variables, and the outputs of setup ops.
[[nodiscard]] PersistentPlan plan_persistent(const graph::Graph& graph);

}  // namespace popsim::memory
