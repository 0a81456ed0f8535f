// When each tensor's memory is in use.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "graph/graph.h"
#include "schedule/action.h"

namespace popsim::memory {

// The ops of one action: all ops of a phase on a stage, in graph order.
struct Block {
  graph::Phase phase;
  int32_t stage;
  std::vector<int64_t> ops;  // positions in Graph::ops()
  // Those that its ops read or write, each once: of views the tensors that own
  // their memory.
  std::vector<graph::TensorId> tensors;
};

// The blocks of a micro-batch in the order it passes through them (forward
// stages up, backward stages down), then the update.
[[nodiscard]] std::vector<Block> make_blocks(const graph::Graph& graph);

// Steps (positions in the blocks laid end to end) from the write to the last
// read of a tensor that lives in the arena.
struct LiveRange {
  graph::TensorId tensor;  // owns memory
  int64_t first = 0;
  int64_t last = 0;
  int64_t bytes = 0;
  // Copies kept, one per micro-batch in flight: 1 unless the tensor is stashed.
  int64_t num_slots = 1;
};

// One range per kValue tensor that an op outside of the setup phase writes.
[[nodiscard]] std::vector<LiveRange> live_ranges(
    const graph::Graph& graph, const std::vector<Block>& blocks,
    const schedule::Schedule& schedule);

}  // namespace popsim::memory
