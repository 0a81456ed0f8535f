// Lanes run a pipeline that is drawn at random, by the waits of its plan. The
// values must be those of one thread.
//
// Prints a line for each wait: `needed` if the plan allows a wrong order
// without it, then `noticed` if the values of a run without it were wrong. With
// the argument `all`, it only runs the plans as they are.
#include "memory/lanes.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <functional>
#include <random>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "threads/crew.h"
#include "threads/progress.h"

namespace popsim {
namespace {

using memory::Wait;
using schedule::Action;
using schedule::ActionKind;

constexpr int64_t kMicroBatches = 24;
constexpr int kAttempts = 10;
constexpr auto kMoment = std::chrono::microseconds(2000);

struct Pipeline {
  graph::Graph graph;
  std::vector<memory::Block> blocks;
  schedule::Schedule schedule;
  memory::LaneOfStage lane_of_stage;
  std::vector<memory::LiveRange> ranges;  // by tensor
  std::vector<std::vector<Wait>> waits;
  std::vector<std::vector<std::pair<size_t, int64_t>>> steps;  // by lane
};

// One op in each pass of each stage. It reads the value before it, and some
// values of earlier passes.
Pipeline draw(std::mt19937& random, schedule::Kind kind) {
  Pipeline p;
  const auto stages = static_cast<int32_t>(2 + random() % 3);
  std::vector<graph::TensorId> values;
  for (int32_t i = 0; i < 2 * stages; ++i) {
    graph::Tensor value;
    value.shape = {1};
    value.strides = {1};
    graph::Op op;
    op.phase = i < stages ? graph::Phase::kForward : graph::Phase::kBackward;
    op.stage = i < stages ? i : 2 * stages - 1 - i;
    for (const graph::TensorId other : values) {
      if (other + 1 == i || random() % 3 == 0) op.inputs.push_back(other);
    }
    values.push_back(p.graph.add(value));
    op.outputs.push_back(values.back());
    p.graph.add(op);
  }
  p.blocks = memory::make_blocks(p.graph);
  const schedule::Config config{stages, kMicroBatches, true};
  p.schedule = schedule::generate(kind, config);
  const auto lanes = static_cast<int32_t>(2 + random() % 2);
  p.lane_of_stage = memory::divide(
      std::vector<double>(static_cast<size_t>(stages), 1.0), lanes);
  p.ranges =
      memory::live_ranges(p.graph, p.blocks, p.schedule, p.lane_of_stage);
  p.waits = memory::find_waits(p.graph, p.blocks, p.ranges, p.lane_of_stage, {},
                               [](const graph::Op&) { return false; });
  p.steps.resize(static_cast<size_t>(p.lane_of_stage.back()) + 1);
  for (const schedule::Stretch& stretch : p.schedule) {
    for (int64_t time = 0; time < stretch.times; ++time) {
      for (const Action& first : stretch.actions) {
        if (first.kind == ActionKind::kUpdate) continue;
        const Action action = schedule::further(first, time);
        const int32_t block = action.kind == ActionKind::kForward
                                  ? action.stage
                                  : 2 * stages - 1 - action.stage;
        const auto lane = static_cast<size_t>(
            p.lane_of_stage[static_cast<size_t>(action.stage)]);
        p.steps[lane].emplace_back(block, action.micro_batch);
      }
    }
  }
  return p;
}

// The memory of a run, and what its ops compute.
class Memory {
 public:
  explicit Memory(const Pipeline& pipeline) : pipeline_(pipeline) {
    for (const memory::LiveRange& range : pipeline.ranges) {
      slots_.emplace_back(static_cast<size_t>(range.num_slots));
    }
    sums_.resize(pipeline.blocks.size());
  }
  void run(size_t block, int64_t micro_batch) {
    for (const int64_t index : pipeline_.blocks[block].ops) {
      const graph::Op& op = pipeline_.graph.ops()[static_cast<size_t>(index)];
      uint64_t value = static_cast<uint64_t>(64 * micro_batch + index) + 1;
      for (const graph::TensorId id : op.inputs) {
        value = (value + slot(id, micro_batch)) * 0x9E3779B97F4A7C15U;
      }
      slot(op.outputs[0], micro_batch) = value;
      sums_[block] = sums_[block] * 31 + value;
    }
  }
  [[nodiscard]] const std::vector<uint64_t>& sums() const { return sums_; }

 private:
  uint64_t& slot(graph::TensorId id, int64_t micro_batch) {
    std::vector<uint64_t>& slots = slots_[static_cast<size_t>(id)];
    return slots[static_cast<size_t>(micro_batch) % slots.size()];
  }

  const Pipeline& pipeline_;
  std::vector<std::vector<uint64_t>> slots_;
  std::vector<uint64_t> sums_;
};

// The values of one thread, with a slot for each micro-batch.
std::vector<uint64_t> expected(Pipeline pipeline) {
  for (memory::LiveRange& range : pipeline.ranges) {
    range.num_slots = kMicroBatches;
  }
  Memory memory(pipeline);
  for (int64_t m = 0; m < kMicroBatches; ++m) {
    for (size_t b = 0; b + 1 < pipeline.blocks.size(); ++b) memory.run(b, m);
  }
  return memory.sums();
}

// `sleeps` is called before each step.
using Sleeps = std::function<void(size_t block)>;
std::vector<uint64_t> run_lanes(const Pipeline& pipeline,
                                const std::vector<std::vector<Wait>>& waits,
                                const Sleeps& sleeps) {
  Memory memory(pipeline);
  threads::Progress progress(pipeline.blocks.size(), true);
  threads::Crew crew(std::ssize(pipeline.steps) - 1);
  const std::function<void(int64_t)> run_lane = [&](int64_t i) {
    for (const auto& [block, m] : pipeline.steps[static_cast<size_t>(i) + 1]) {
      for (const Wait& wait : waits[block]) {
        progress.wait(wait.block, m - wait.distance + 1, [] { return true; });
      }
      sleeps(block);
      memory.run(block, m);
      progress.raise(block, m + 1);
    }
  };
  crew.start(run_lane);
  run_lane(-1);
  crew.join([] {});
  return memory.sums();
}

// Whether a block can begin a micro-batch too early without one of its waits:
// the other block stands still at each micro-batch in turn, and all else runs
// as far as it can.
bool is_needed(const Pipeline& pipeline,
               const std::vector<std::vector<Wait>>& waits, size_t block,
               const Wait& dropped) {
  for (int64_t still = 0; still < kMicroBatches; ++still) {
    std::vector<int64_t> finished(pipeline.blocks.size());
    std::vector<size_t> position(pipeline.steps.size());
    const auto can_run = [&](size_t b, int64_t m) {
      return (b != dropped.block || m < still) &&
             std::ranges::all_of(waits[b], [&](const Wait& wait) {
               return finished[wait.block] > m - wait.distance;
             });
    };
    for (bool moved = true; std::exchange(moved, false);) {
      for (size_t lane = 0; lane < position.size(); ++lane) {
        const auto& steps = pipeline.steps[lane];
        while (position[lane] < steps.size()) {
          const auto [b, m] = steps[position[lane]];
          if (!can_run(b, m)) break;
          if (b == block && finished[dropped.block] <= m - dropped.distance) {
            return true;
          }
          finished[b] = m + 1;
          ++position[lane];
          moved = true;
        }
      }
    }
  }
  return false;
}

void drop_each(const Pipeline& pipeline, const std::vector<uint64_t>& values) {
  for (size_t block = 0; block < pipeline.waits.size(); ++block) {
    for (size_t i = 0; i < pipeline.waits[block].size(); ++i) {
      std::vector<std::vector<Wait>> waits = pipeline.waits;
      const Wait dropped = waits[block][i];
      waits[block].erase(waits[block].begin() + static_cast<std::ptrdiff_t>(i));
      const bool needed = is_needed(pipeline, waits, block, dropped);
      const Sleeps sleeps = [&](size_t b) {
        if (b == dropped.block) std::this_thread::sleep_for(kMoment);
      };
      bool noticed = false;
      for (int k = 0; k < (needed ? kAttempts : 1) && !noticed; ++k) {
        noticed = run_lanes(pipeline, waits, sleeps) != values;
      }
      std::printf("%s %s\n", needed ? "needed" : "implied",
                  noticed ? "noticed" : "unnoticed");
    }
  }
}

int run(bool only_all) {
  std::mt19937 random(1);
  int wrong = 0;
  for (int i = 0; i < (only_all ? 60 : 12); ++i) {
    const auto kind =
        std::array{schedule::Kind::kPipelined, schedule::Kind::kGrouped,
                   schedule::Kind::kInterleaved}[static_cast<size_t>(i) % 3];
    const Pipeline pipeline = draw(random, kind);
    const std::vector<uint64_t> values = expected(pipeline);
    const Sleeps sleeps = [&](size_t) {
      thread_local std::mt19937 own(static_cast<unsigned>(i));
      if (own() % 16 == 0) std::this_thread::sleep_for(kMoment);
    };
    if (run_lanes(pipeline, pipeline.waits, sleeps) != values) {
      ++wrong;
      std::fprintf(stderr, "pipeline %d: wrong values\n", i);
    }
    if (!only_all) drop_each(pipeline, values);
  }
  return wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace popsim

int main(int argc, char** argv) {
  return popsim::run(argc > 1 && std::string_view(argv[1]) == "all");
}
