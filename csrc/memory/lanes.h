// Lanes: neighbouring stages that one thread works on, beside other threads.
//
// Lanes work at the same time, each in the order of the schedule. They share
// constants and variables, which no micro-batch changes for another lane, and
// values that cross from one lane to another. These have memory of their own,
// and the waits of blocks keep their readers and writers apart.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "graph/graph.h"
#include "memory/live_range.h"

namespace popsim::memory {

// How a block uses a tensor that owns memory.
struct BlockUse {
  size_t block;  // position in the list of blocks
  bool writes;
};

// Whether the outputs of an op are its inputs, which it does not change.
using SeesInputs = std::function<bool(const graph::Op&)>;

// By TensorId, the uses of each tensor in the order of the blocks.
[[nodiscard]] std::vector<std::vector<BlockUse>> find_uses(
    const graph::Graph& graph, const std::vector<Block>& blocks,
    const SeesInputs& sees_inputs);

// A block may begin micro-batch m when another one has finished micro-batch
// m - distance.
struct Wait {
  // The other one. The number of blocks stands for the beginning of a
  // micro-batch: its elements are taken from the feeds, on the first stage.
  size_t block;
  int64_t distance;
};

// Divides stages among at most `most` lanes, so that the lane with the most
// work has as little as possible. The lane of each stage, counted from 0.
[[nodiscard]] LaneOfStage divide(const std::vector<double>& work, int32_t most);

// Whether lanes can work at the same time: no micro-batch changes a variable
// that another lane uses, and no value is written by two lanes.
[[nodiscard]] bool can_share(const graph::Graph& graph,
                             const std::vector<Block>& blocks,
                             const LaneOfStage& lane_of_stage,
                             const SeesInputs& sees_inputs);

// The waits of each block, for values that lanes hand to each other. The update
// begins when all lanes are done, so it is in none of them. `positions` are
// those of the stages in the pipeline, as in the configuration of a schedule.
[[nodiscard]] std::vector<std::vector<Wait>> find_waits(
    const graph::Graph& graph, const std::vector<Block>& blocks,
    const std::vector<LiveRange>& ranges, const LaneOfStage& lane_of_stage,
    const std::vector<int32_t>& positions, const SeesInputs& sees_inputs);

// The blocks that a micro-batch passes through last, which are several if their
// stages are concurrent. When all have finished it, it has left the pipeline.
[[nodiscard]] std::vector<size_t> find_last(
    const std::vector<Block>& blocks, const std::vector<int32_t>& positions,
    bool training);

}  // namespace popsim::memory
