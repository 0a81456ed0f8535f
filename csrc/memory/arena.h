// Offsets in one block of memory for everything the arena holds.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "graph/graph.h"
#include "memory/live_range.h"

namespace popsim::memory {

inline constexpr int64_t kAlignment = 64;  // bytes: one cache line

struct Placement {
  int64_t offset = -1;  // bytes from the start of the arena; -1: not in it
  int64_t slot_bytes = 0;
  int64_t num_slots = 0;
};

struct ArenaPlan {
  std::vector<Placement> placements;  // by TensorId
  int64_t arena_bytes = 0;
  int64_t peak_live_bytes = 0;  // the least any plan could need
};

// Whether an op may write its first output over an input that dies there.
using ReusesInput = std::function<bool(const graph::Op&)>;

[[nodiscard]] ArenaPlan plan_arena(const graph::Graph& graph,
                                   const std::vector<Block>& blocks,
                                   const std::vector<LiveRange>& ranges,
                                   const ReusesInput& reuses_input);

}  // namespace popsim::memory
