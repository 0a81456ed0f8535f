// The offsets of all tensors of the arena in one block of memory.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "graph/graph.h"
#include "memory/live_range.h"

namespace popsim::memory {

inline constexpr int64_t kAlignment = 64;  // bytes: one cache line

struct Placement {
  // Bytes from the start of the arena; -1: not in the arena.
  int64_t offset = -1;
  int64_t slot_bytes = 0;
  int64_t num_slots = 0;
};

struct ArenaPlan;

// The place of the memory that an op has for its bodies. Only one of them runs
// at a time.
struct BodyPlacement {
  int64_t offset = -1;  // bytes from the start of the op's arena
  std::vector<ArenaPlan> plans;
};

struct ArenaPlan {
  std::vector<Placement> placements;  // by TensorId
  int64_t arena_bytes = 0;
  int64_t peak_live_bytes = 0;              // the minimum that any plan needs
  std::map<int64_t, BodyPlacement> bodies;  // by position of the op
};

// Whether an op may write its first output over an input that it reads last.
using ReusesInput = std::function<bool(const graph::Op&)>;

// The arena also holds the bodies of ops. The inputs and results of bodies are
// not in their arenas: the ops provide their memory.
[[nodiscard]] ArenaPlan plan_arena(const graph::Graph& graph,
                                   const std::vector<Block>& blocks,
                                   const std::vector<LiveRange>& ranges,
                                   const LaneOfStage& lane_of_stage,
                                   const ReusesInput& reuses_input);

}  // namespace popsim::memory
