#include "memory/arena.h"

#include <algorithm>
#include <map>
#include <numeric>

#include "base/numbers.h"
#include "schedule/action.h"

namespace popsim::memory {
namespace {

using graph::TensorId;

constexpr int64_t kNoOp = -1;

// Tensors that share one place, because each overwrites the one before it; or
// the memory of an op's bodies.
struct Buffer {
  std::vector<TensorId> tensors;
  int64_t first = 0;
  int64_t last = 0;
  int64_t bytes = 0;  // bytes of all slots
  int64_t offset = -1;
  int64_t op = kNoOp;
  int32_t lane = 0;  // only buffers of one lane share memory
};

// The input that the op's first output may overwrite, or kNoTensor.
TensorId overwritten_input(const graph::Graph& graph, const graph::Op& op,
                           const std::map<TensorId, const LiveRange*>& live,
                           int64_t step) {
  const graph::Tensor& out = graph.tensor(op.outputs[0]);
  for (const TensorId id : op.inputs) {
    if (id == graph::kNoTensor) continue;
    const graph::Tensor& in = graph.tensor(id);
    const TensorId root = graph.root(id);
    const auto found = live.find(root);
    const auto readers = std::count_if(
        op.inputs.begin(), op.inputs.end(), [&graph, root](TensorId other) {
          return other != graph::kNoTensor && graph.root(other) == root;
        });
    if (found != live.end() && found->second->last == step &&
        found->second->num_slots == 1 && readers == 1 && in.contiguous() &&
        in.shape == out.shape && in.dtype == out.dtype &&
        in.numel() == graph.tensor(root).numel()) {
      return root;
    }
  }
  return graph::kNoTensor;
}

std::vector<Buffer> make_buffers(const graph::Graph& graph,
                                 const std::vector<Block>& blocks,
                                 const std::vector<LiveRange>& ranges,
                                 const ReusesInput& reuses_input) {
  std::map<TensorId, const LiveRange*> live;
  for (const LiveRange& range : ranges) live[range.tensor] = &range;

  std::vector<Buffer> buffers;
  std::map<TensorId, size_t> buffer_of;
  const auto start_buffer = [&](const LiveRange& range) {
    buffer_of[range.tensor] = buffers.size();
    buffers.push_back({{range.tensor},
                       range.first,
                       range.last,
                       round_up(range.bytes, kAlignment) * range.num_slots,
                       -1,
                       kNoOp,
                       range.lane});
  };
  int64_t step = 0;
  for (const Block& block : blocks) {
    for (const int64_t index : block.ops) {
      const graph::Op& op = graph.ops()[static_cast<size_t>(index)];
      for (const TensorId id : op.outputs) {
        if (id == graph::kNoTensor) continue;
        const TensorId root = graph.root(id);
        const auto range = live.find(root);
        if (range == live.end() || buffer_of.contains(root)) continue;
        // A stashed output is in use from the first to the last step.
        const bool local =
            range->second->first == step && range->second->num_slots == 1;
        const TensorId over = local && id == op.outputs[0] && reuses_input(op)
                                  ? overwritten_input(graph, op, live, step)
                                  : graph::kNoTensor;
        if (over == graph::kNoTensor) {
          start_buffer(*range->second);
          continue;
        }
        Buffer& shared = buffers[buffer_of.at(over)];
        shared.tensors.push_back(root);
        shared.last = std::max(shared.last, range->second->last);
        buffer_of[root] = buffer_of.at(over);
      }
      ++step;
    }
  }
  return buffers;
}

// Places the buffers of a lane, the largest ones first, each at the lowest
// offset from `start` on that is free during its lifetime. Returns their end.
int64_t place_lane(std::vector<Buffer>& buffers, int32_t lane, int64_t start) {
  std::vector<size_t> order;
  for (size_t i = 0; i < buffers.size(); ++i) {
    if (buffers[i].lane == lane) order.push_back(i);
  }
  std::stable_sort(order.begin(), order.end(), [&buffers](size_t a, size_t b) {
    return buffers[a].bytes > buffers[b].bytes;
  });
  int64_t end = start;
  std::vector<size_t> placed;  // sorted by offset
  for (const size_t i : order) {
    Buffer& buffer = buffers[i];
    int64_t offset = start;
    for (const size_t j : placed) {
      const Buffer& other = buffers[j];
      if (other.last < buffer.first || buffer.last < other.first) continue;
      if (other.offset >= offset + buffer.bytes) break;
      offset = std::max(offset, other.offset + other.bytes);
    }
    buffer.offset = offset;
    end = std::max(end, offset + buffer.bytes);
    const auto position = std::upper_bound(placed.begin(), placed.end(), offset,
                                           [&buffers](int64_t value, size_t j) {
                                             return value < buffers[j].offset;
                                           });
    placed.insert(position, i);
  }
  return end;
}

// Places the lanes one after another. Returns the end of all buffers.
int64_t place(std::vector<Buffer>& buffers) {
  int32_t last_lane = 0;
  for (const Buffer& buffer : buffers) {
    last_lane = std::max(last_lane, buffer.lane);
  }
  int64_t end = 0;
  for (int32_t lane = 0; lane <= last_lane; ++lane) {
    end = place_lane(buffers, lane, end);
  }
  return end;
}

int64_t peak_bytes(const std::vector<Buffer>& buffers) {
  std::map<int64_t, int64_t> change;
  for (const Buffer& buffer : buffers) {
    change[buffer.first] += buffer.bytes;
    change[buffer.last + 1] -= buffer.bytes;
  }
  int64_t now = 0;
  int64_t peak = 0;
  for (const auto& [step, bytes] : change) {
    now += bytes;
    peak = std::max(peak, now);
  }
  return peak;
}

// The tensors of a body between its first and its last op, without its results.
ArenaPlan plan_body(const graph::Graph& body, const ReusesInput& reuses_input) {
  Block block{graph::Phase::kForward, 0, {}, {}};
  block.ops.resize(body.ops().size());
  std::iota(block.ops.begin(), block.ops.end(), int64_t{0});
  const schedule::Config once{1, 1, false};
  std::vector<LiveRange> ranges =
      live_ranges(body, {block},
                  schedule::generate(schedule::Kind::kSequential, once), {0});
  const std::vector<TensorId>& results = graph::results_of(body);
  std::erase_if(ranges, [&results](const LiveRange& range) {
    return std::ranges::find(results, range.tensor) != results.end();
  });
  return plan_arena(body, {block}, ranges, {0}, reuses_input);
}

// Plans the bodies of all ops, and adds one buffer for the bodies of each op.
std::map<int64_t, BodyPlacement> plan_bodies(const graph::Graph& graph,
                                             const std::vector<Block>& blocks,
                                             const LaneOfStage& lane_of_stage,
                                             const ReusesInput& reuses_input,
                                             std::vector<Buffer>& buffers) {
  std::map<int64_t, BodyPlacement> placements;
  int64_t step = 0;
  for (const Block& block : blocks) {
    const int32_t lane = lane_of_stage[static_cast<size_t>(block.stage)];
    for (const int64_t index : block.ops) {
      const graph::Op& op = graph.ops()[static_cast<size_t>(index)];
      int64_t bytes = 0;
      for (const auto& body : op.bodies) {
        std::vector<ArenaPlan>& plans = placements[index].plans;
        plans.push_back(plan_body(*body, reuses_input));
        bytes = std::max(bytes, plans.back().arena_bytes);
      }
      if (!op.bodies.empty()) {
        const int64_t aligned = round_up(bytes, kAlignment);
        buffers.push_back({{}, step, step, aligned, -1, index, lane});
      }
      ++step;
    }
  }
  return placements;
}

}  // namespace

ArenaPlan plan_arena(const graph::Graph& graph,
                     const std::vector<Block>& blocks,
                     const std::vector<LiveRange>& ranges,
                     const LaneOfStage& lane_of_stage,
                     const ReusesInput& reuses_input) {
  std::vector<Buffer> buffers =
      make_buffers(graph, blocks, ranges, reuses_input);
  ArenaPlan plan;
  plan.bodies =
      plan_bodies(graph, blocks, lane_of_stage, reuses_input, buffers);
  plan.arena_bytes = place(buffers);
  plan.peak_live_bytes = peak_bytes(buffers);
  plan.placements.resize(graph.tensors().size());
  std::map<TensorId, int64_t> slots;
  for (const LiveRange& range : ranges) slots[range.tensor] = range.num_slots;
  for (const Buffer& buffer : buffers) {
    for (const TensorId id : buffer.tensors) {
      const int64_t num_slots = slots.at(id);
      plan.placements[static_cast<size_t>(id)] = {
          buffer.offset, buffer.bytes / num_slots, num_slots};
    }
    if (buffer.op != kNoOp) plan.bodies.at(buffer.op).offset = buffer.offset;
  }
  return plan;
}

}  // namespace popsim::memory
