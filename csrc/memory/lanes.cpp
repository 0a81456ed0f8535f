#include "memory/lanes.h"

#include <algorithm>
#include <limits>
#include <map>
#include <utility>

namespace popsim::memory {
namespace {

using graph::Phase;
using graph::TensorId;

// A division of the first stages: the work of the lane that has most, and the
// first stage of the last lane.
struct Division {
  double largest = std::numeric_limits<double>::infinity();
  size_t last_begin = 0;
};

// The slots that a micro-batch passes through, one after another: forward at
// each position of the pipeline, then backward. The update has none.
class Slots {
 public:
  Slots(const std::vector<Block>& blocks, const std::vector<int32_t>& positions)
      : blocks_(blocks), positions_(positions) {
    for (const Block& block : blocks) {
      last_ = std::max(last_, schedule::position_of(positions, block.stage));
    }
  }

  [[nodiscard]] int32_t of(size_t block) const {
    const Block& one = blocks_[block];
    if (one.phase == Phase::kUpdate) return -1;
    const int32_t position = schedule::position_of(positions_, one.stage);
    return one.phase == Phase::kForward ? position : 2 * last_ + 1 - position;
  }
  [[nodiscard]] int32_t last(bool training) const {
    return training ? 2 * last_ + 1 : last_;
  }

 private:
  const std::vector<Block>& blocks_;
  const std::vector<int32_t>& positions_;
  int32_t last_ = 0;
};

}  // namespace

std::vector<std::vector<BlockUse>> find_uses(const graph::Graph& graph,
                                             const std::vector<Block>& blocks,
                                             const SeesInputs& sees_inputs) {
  std::vector<std::vector<BlockUse>> uses(graph.tensors().size());
  const auto add = [&](TensorId id, size_t block, bool writes) {
    if (id == graph::kNoTensor) return;
    std::vector<BlockUse>& own = uses[static_cast<size_t>(graph.root(id))];
    if (own.empty() || own.back().block != block) {
      own.push_back({block, writes});
    } else {
      own.back().writes = own.back().writes || writes;
    }
  };
  for (size_t b = 0; b < blocks.size(); ++b) {
    for (const int64_t index : blocks[b].ops) {
      const graph::Op& op = graph.ops()[static_cast<size_t>(index)];
      for (const TensorId id : op.inputs) add(id, b, false);
      const bool writes = !sees_inputs(op);
      for (const TensorId id : op.outputs) add(id, b, writes);
    }
  }
  return uses;
}

LaneOfStage divide(const std::vector<double>& work, int32_t most) {
  const size_t stages = work.size();
  const size_t lanes = std::clamp<size_t>(
      static_cast<size_t>(std::max(most, 1)), 1, std::max<size_t>(stages, 1));
  // best[n][s]: the first s stages on n + 1 lanes.
  std::vector<std::vector<Division>> best(lanes,
                                          std::vector<Division>(stages + 1));
  for (size_t n = 0; n < lanes; ++n) {
    for (size_t end = n + 1; end <= stages; ++end) {
      double own = 0;
      for (size_t begin = end; begin-- > n;) {
        own += work[begin];
        if (n == 0 && begin > 0) continue;
        const double before = n == 0 ? 0 : best[n - 1][begin].largest;
        const double largest = std::max(before, own);
        if (largest < best[n][end].largest) best[n][end] = {largest, begin};
      }
    }
  }
  LaneOfStage lane_of_stage(stages);
  size_t end = stages;
  for (size_t n = lanes; n-- > 0;) {
    const size_t begin = best[n][end].last_begin;
    std::fill(lane_of_stage.begin() + static_cast<std::ptrdiff_t>(begin),
              lane_of_stage.begin() + static_cast<std::ptrdiff_t>(end),
              static_cast<int32_t>(n));
    end = begin;
  }
  return lane_of_stage;
}

bool can_share(const graph::Graph& graph, const std::vector<Block>& blocks,
               const LaneOfStage& lane_of_stage,
               const SeesInputs& sees_inputs) {
  const std::vector<std::vector<BlockUse>> uses =
      find_uses(graph, blocks, sees_inputs);
  for (size_t i = 0; i < uses.size(); ++i) {
    const graph::TensorKind kind = graph.tensors()[i].kind;
    int32_t only = -1;  // the lane of all uses, or of all writes
    int32_t writer = -1;
    bool several = false;
    bool several_writers = false;
    for (const BlockUse& use : uses[i]) {
      const Block& block = blocks[use.block];
      if (block.phase == Phase::kUpdate) continue;
      const int32_t lane = lane_of_stage[static_cast<size_t>(block.stage)];
      several = several || (only >= 0 && only != lane);
      only = lane;
      if (!use.writes) continue;
      several_writers = several_writers || (writer >= 0 && writer != lane);
      writer = lane;
    }
    const bool is_value = kind == graph::TensorKind::kValue;
    if (is_value ? several_writers : several && writer >= 0) return false;
  }
  return true;
}

std::vector<std::vector<Wait>> find_waits(const graph::Graph& graph,
                                          const std::vector<Block>& blocks,
                                          const std::vector<LiveRange>& ranges,
                                          const LaneOfStage& lane_of_stage,
                                          const std::vector<int32_t>& positions,
                                          const SeesInputs& sees_inputs) {
  const std::vector<std::vector<BlockUse>> uses =
      find_uses(graph, blocks, sees_inputs);
  const auto lane_of = [&](size_t block) {
    return lane_of_stage[static_cast<size_t>(blocks[block].stage)];
  };
  // The shortest distance to each other block: it includes longer ones.
  std::vector<std::map<size_t, int64_t>> shortest(blocks.size());
  const auto add = [&](size_t block, size_t other, int64_t distance) {
    const auto [found, is_new] = shortest[block].emplace(other, distance);
    if (!is_new) found->second = std::min(found->second, distance);
  };
  for (const LiveRange& range : ranges) {
    const std::vector<BlockUse>& own = uses[static_cast<size_t>(range.tensor)];
    for (const BlockUse& writer : own) {
      if (!writer.writes || blocks[writer.block].phase == Phase::kUpdate) {
        continue;
      }
      for (const BlockUse& reader : own) {
        if (blocks[reader.block].phase == Phase::kUpdate ||
            lane_of(reader.block) == lane_of(writer.block)) {
          continue;
        }
        add(reader.block, writer.block, 0);
        add(writer.block, reader.block, range.num_slots);
      }
    }
  }
  // A micro-batch passes through the slots in their order, also where it hands
  // nothing on. So none begins before its first block has.
  const Slots slots(blocks, positions);
  size_t before = 0;  // the first block of the slot before, and of this one
  size_t here = 0;
  for (size_t b = 1; b < blocks.size(); ++b) {
    const int32_t slot = slots.of(b);
    if (slot < 0) break;
    if (slot != slots.of(here)) before = std::exchange(here, b);
    if (slot == 0 && lane_of(b) != lane_of(0)) add(b, blocks.size(), 0);
    for (size_t other = before; other < here; ++other) {
      if (lane_of(other) != lane_of(b)) add(b, other, 0);
    }
  }
  std::vector<std::vector<Wait>> waits(blocks.size());
  for (size_t b = 0; b < blocks.size(); ++b) {
    for (const auto& [other, distance] : shortest[b]) {
      waits[b].push_back({other, distance});
    }
  }
  return waits;
}

std::vector<size_t> find_last(const std::vector<Block>& blocks,
                              const std::vector<int32_t>& positions,
                              bool training) {
  const Slots slots(blocks, positions);
  std::vector<size_t> found;
  for (size_t b = 0; b < blocks.size(); ++b) {
    if (slots.of(b) == slots.last(training)) found.push_back(b);
  }
  return found;
}

}  // namespace popsim::memory
