// Offsets for everything that keeps its memory for all runs.
#pragma once

#include <cstdint>
#include <vector>

#include "graph/graph.h"

namespace popsim::memory {

struct PersistentPlan {
  std::vector<int64_t> offsets;  // bytes, by TensorId; -1: not in it
  int64_t bytes = 0;
};

// Places constants, variables, and what setup ops write.
[[nodiscard]] PersistentPlan plan_persistent(const graph::Graph& graph);

}  // namespace popsim::memory
