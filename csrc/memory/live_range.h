// When each tensor's memory is in use.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "graph/graph.h"
#include "schedule/action.h"

namespace popsim::memory {

// The lane of each stage: which of the threads that run a pipeline works on it.
using LaneOfStage = std::vector<int32_t>;

// The ops of one action: all ops of a phase on a stage, in graph order.
struct Block {
  graph::Phase phase;
  int32_t stage;
  std::vector<int64_t> ops;  // positions in Graph::ops()
  // The tensors that its ops read or write, each once; for views, the tensors
  // that own the memory.
  std::vector<graph::TensorId> tensors;
};

// The blocks in the order in which a micro-batch passes through them (forward
// from the first stage to the last, then backward), then the update.
[[nodiscard]] std::vector<Block> make_blocks(const graph::Graph& graph);

// The steps (positions in all blocks, one after the other) from the write to
// the last read of a tensor in the arena.
struct LiveRange {
  graph::TensorId tensor;  // it owns its memory
  int64_t first = 0;
  int64_t last = 0;
  int64_t bytes = 0;
  // The number of copies, one per micro-batch in flight: 1 if the tensor is not
  // stashed.
  int64_t num_slots = 1;
  // Whose memory it is in. Values that cross from lane to lane are in that of
  // lane 0, and share their place with nothing.
  int32_t lane = 0;
};

// One range for each kValue tensor that an op outside the setup phase writes.
[[nodiscard]] std::vector<LiveRange> live_ranges(
    const graph::Graph& graph, const std::vector<Block>& blocks,
    const schedule::Schedule& schedule, const LaneOfStage& lane_of_stage);

}  // namespace popsim::memory
