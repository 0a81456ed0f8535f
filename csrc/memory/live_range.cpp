#include "memory/live_range.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "base/check.h"

namespace popsim::memory {
namespace {

using graph::Phase;
using graph::TensorId;

constexpr int64_t kNever = -1;

struct Use {
  int64_t first_step = kNever;
  int64_t last_step = kNever;
  size_t first_block = 0;
  size_t last_block = 0;
};

schedule::ActionKind action_kind(Phase phase) {
  switch (phase) {
    case Phase::kForward:
      return schedule::ActionKind::kForward;
    case Phase::kBackward:
      return schedule::ActionKind::kBackward;
    case Phase::kUpdate:
      return schedule::ActionKind::kUpdate;
    case Phase::kSetup:
      break;
  }
  throw InternalError("live_range: setup ops are not part of the schedule");
}

void touch(std::vector<Use>& uses, TensorId root, int64_t step, size_t block) {
  Use& use = uses[static_cast<size_t>(root)];
  if (use.first_step == kNever) {
    use.first_step = step;
    use.first_block = block;
  }
  use.last_step = step;
  use.last_block = block;
}

std::vector<Use> collect_uses(const graph::Graph& graph,
                              const std::vector<Block>& blocks) {
  std::vector<Use> uses(graph.tensors().size());
  int64_t step = 0;
  for (size_t b = 0; b < blocks.size(); ++b) {
    for (const int64_t index : blocks[b].ops) {
      const graph::Op& op = graph.ops()[static_cast<size_t>(index)];
      for (const TensorId id : op.inputs) {
        if (id != graph::kNoTensor) touch(uses, graph.root(id), step, b);
      }
      for (const TensorId id : op.outputs) {
        if (id != graph::kNoTensor) touch(uses, graph.root(id), step, b);
      }
      ++step;
    }
  }
  return uses;
}

bool runs(const schedule::Action& action, const Block& block) {
  return action.kind == action_kind(block.phase) &&
         (action.kind == schedule::ActionKind::kUpdate ||
          action.stage == block.stage);
}

// The largest number of micro-batches between the write in `from` and the last
// read in `to`. 0 if no other block ever runs in between, as on the last stage,
// where backward directly follows forward.
int64_t count_slots(const schedule::ActionList& actions, const Block& from,
                    const Block& to) {
  int64_t live = 0;
  int64_t most = 1;
  bool apart = false;
  for (size_t i = 0; i < actions.size(); ++i) {
    if (runs(actions[i], from)) {
      most = std::max(most, ++live);
      apart = apart || i + 1 == actions.size() || !runs(actions[i + 1], to);
    }
    if (runs(actions[i], to)) --live;
  }
  return apart ? most : 0;
}

std::vector<TensorId> tensors_of(const graph::Graph& graph,
                                 const std::vector<int64_t>& ops) {
  std::set<TensorId> roots;
  for (const int64_t index : ops) {
    const graph::Op& op = graph.ops()[static_cast<size_t>(index)];
    for (const auto* ids : {&op.inputs, &op.outputs}) {
      for (const TensorId id : *ids) {
        if (id != graph::kNoTensor) roots.insert(graph.root(id));
      }
    }
  }
  return {roots.begin(), roots.end()};
}

// By TensorId, the lanes whose micro-batches use it.
std::vector<std::set<int32_t>> lanes_of_tensors(
    const graph::Graph& graph, const std::vector<Block>& blocks,
    const LaneOfStage& lane_of_stage) {
  std::vector<std::set<int32_t>> lanes(graph.tensors().size());
  for (const Block& block : blocks) {
    if (block.phase == Phase::kUpdate) continue;
    const int32_t lane = lane_of_stage[static_cast<size_t>(block.stage)];
    for (const TensorId root : block.tensors) {
      lanes[static_cast<size_t>(root)].insert(lane);
    }
  }
  return lanes;
}

}  // namespace

std::vector<Block> make_blocks(const graph::Graph& graph) {
  std::vector<Block> blocks;
  const int32_t stages = graph.num_stages();
  for (int32_t s = 0; s < stages; ++s) {
    blocks.push_back({Phase::kForward, s, {}, {}});
  }
  for (int32_t s = stages; s-- > 0;) {
    blocks.push_back({Phase::kBackward, s, {}, {}});
  }
  blocks.push_back({Phase::kUpdate, 0, {}, {}});
  for (size_t i = 0; i < graph.ops().size(); ++i) {
    const graph::Op& op = graph.ops()[i];
    if (op.phase == Phase::kSetup) continue;
    const int32_t stage = op.phase == Phase::kUpdate ? 0 : op.stage;
    const auto block = std::find_if(
        blocks.begin(), blocks.end(), [&op, stage](const Block& candidate) {
          return candidate.phase == op.phase && candidate.stage == stage;
        });
    block->ops.push_back(static_cast<int64_t>(i));
  }
  for (Block& block : blocks) block.tensors = tensors_of(graph, block.ops);
  return blocks;
}

std::vector<LiveRange> live_ranges(const graph::Graph& graph,
                                   const std::vector<Block>& blocks,
                                   const schedule::Schedule& schedule,
                                   const LaneOfStage& lane_of_stage) {
  const schedule::ActionList actions = schedule::shortened(schedule);
  const std::vector<Use> uses = collect_uses(graph, blocks);
  int64_t num_steps = 0;
  for (const Block& block : blocks) {
    num_steps += static_cast<int64_t>(block.ops.size());
  }
  std::vector<bool> setup(graph.tensors().size());
  for (const graph::Op& op : graph.ops()) {
    if (op.phase != Phase::kSetup) continue;
    for (const TensorId id : op.outputs) {
      if (id == graph::kNoTensor) continue;
      setup[static_cast<size_t>(graph.root(id))] = true;
    }
  }
  const std::vector<std::set<int32_t>> lanes =
      lanes_of_tensors(graph, blocks, lane_of_stage);
  const bool pipelined = schedule::max_in_flight(schedule) > 1;
  std::map<std::pair<size_t, size_t>, int64_t> slots;
  std::vector<LiveRange> ranges;
  for (size_t i = 0; i < uses.size(); ++i) {
    const graph::Tensor& t = graph.tensors()[i];
    const Use& use = uses[i];
    if (t.kind != graph::TensorKind::kValue || setup[i] ||
        use.first_step == kNever) {
      continue;
    }
    LiveRange range{static_cast<TensorId>(i),
                    use.first_step,
                    use.last_step,
                    t.bytes(),
                    1,
                    0};
    const bool crosses = lanes[i].size() > 1;
    if (lanes[i].size() == 1) range.lane = *lanes[i].begin();
    if (pipelined && use.first_block != use.last_block) {
      // If other micro-batches run in between, the tensor is stashed, and no
      // other tensor shares its memory.
      const auto key = std::make_pair(use.first_block, use.last_block);
      if (!slots.contains(key)) {
        slots[key] = count_slots(actions, blocks[use.first_block],
                                 blocks[use.last_block]);
      }
      if (slots[key] > 0 || crosses) {
        // With one slot more, a lane can be one micro-batch further ahead than
        // in the order of the schedule. Else neighbours would work in turns.
        range.num_slots =
            crosses ? std::max<int64_t>(slots[key], 1) + 1 : slots[key];
        range.first = 0;
        range.last = num_steps;
      }
    }
    ranges.push_back(range);
  }
  return ranges;
}

}  // namespace popsim::memory
