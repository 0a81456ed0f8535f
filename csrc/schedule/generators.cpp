#include <algorithm>
#include <vector>

#include "base/check.h"
#include "schedule/action.h"

namespace popsim::schedule {
namespace {

// Slot k on the way of a micro-batch through the pipeline: forward of stages
// 0..S-1, then backward of stages S-1..0.
Action slot_action(const Config& config, int32_t slot, int64_t micro_batch) {
  if (slot < config.num_stages) {
    return {ActionKind::kForward, slot, micro_batch};
  }
  return {ActionKind::kBackward, 2 * config.num_stages - 1 - slot, micro_batch};
}

int32_t num_slots(const Config& config) {
  return config.training ? 2 * config.num_stages : config.num_stages;
}

// How micro-batches follow one another through a pipeline. The devices of all
// slots form a ring, and a schedule is the set of rotations of this ring that
// it uses at the same time: all of them (an interval of one slot), every second
// one, or only one.
struct Rhythm {
  // The actions of micro-batch 0 at each time step, from its first time step.
  std::vector<ActionList> positions;
  // Number of time steps from the start of one micro-batch to the start of the
  // next.
  int64_t interval = 1;
  // The order of the positions of one time step. Later ones free the stashes
  // that earlier ones fill.
  std::vector<int64_t> order;
};

// Each slot has its own time step; later slots run first.
Rhythm ring(const Config& config, int64_t interval) {
  Rhythm rhythm{.interval = interval};
  for (int32_t slot = 0; slot < num_slots(config); ++slot) {
    rhythm.positions.push_back({slot_action(config, slot, 0)});
    rhythm.order.push_back(num_slots(config) - 1 - slot);
  }
  return rhythm;
}

// The actions from one time step to another, repeated `times` times.
Stretch at_times(const Config& config, const Rhythm& rhythm, int64_t begin,
                 int64_t end, int64_t times = 1) {
  Stretch stretch{.times = times};
  for (int64_t time = begin; time < end; ++time) {
    stretch.begins.push_back(stretch.actions.size());
    for (const int64_t position : rhythm.order) {
      const int64_t since = time - position;
      const int64_t mb = since / rhythm.interval;
      if (since < 0 || since % rhythm.interval != 0 ||
          mb >= config.num_micro_batches) {
        continue;
      }
      for (const Action& first :
           rhythm.positions[static_cast<size_t>(position)]) {
        stretch.actions.push_back(further(first, mb));
      }
    }
  }
  return stretch;
}

// The pipeline fills, repeats one interval, and drains.
Schedule in_rhythm(const Config& config, const Rhythm& rhythm) {
  const auto depth = static_cast<int64_t>(rhythm.positions.size());
  const int64_t interval = rhythm.interval;
  // The first interval that uses every position.
  const int64_t full = depth - interval;
  const int64_t num_begun = (full + interval - 1) / interval;
  // If there are too few micro-batches, the pipeline drains before it is full.
  const int64_t times =
      std::max<int64_t>(0, config.num_micro_batches - num_begun);
  const int64_t end = interval * (config.num_micro_batches - 1) + depth;
  const Stretch stretches[] = {
      at_times(config, rhythm, 0, full),
      at_times(config, rhythm, full, full + interval, times),
      at_times(config, rhythm, full + times * interval, end),
  };
  Schedule schedule;
  for (const Stretch& stretch : stretches) {
    if (stretch.times > 0 && !stretch.actions.empty()) {
      schedule.push_back(stretch);
    }
  }
  if (config.training) {
    schedule.push_back(
        {.actions = {{ActionKind::kUpdate, 0, 0}}, .begins = {0}});
  }
  return schedule;
}

Schedule sequential(const Config& config) {
  return in_rhythm(config, ring(config, num_slots(config)));
}

Schedule pipelined(const Config& config) {
  Rhythm rhythm = ring(config, 1);
  if (config.training) {
    // The last forward and the first backward share a position: the last stage
    // runs both, one after the other.
    const auto turn = rhythm.positions.begin() + config.num_stages;
    (turn - 1)->push_back(turn->front());
    rhythm.positions.erase(turn);
    rhythm.order.erase(rhythm.order.begin());
  }
  return in_rhythm(config, rhythm);
}

Schedule grouped(const Config& config) {
  Rhythm rhythm = ring(config, 1);
  // All forward actions run first, then all backward actions.
  std::rotate(rhythm.order.begin(), rhythm.order.end() - config.num_stages,
              rhythm.order.end());
  return in_rhythm(config, rhythm);
}

Schedule interleaved(const Config& config) {
  // Two slots whose numbers differ by an odd number can belong to the same
  // device; the ring of inference has each device once.
  return in_rhythm(config, ring(config, config.training ? 2 : 1));
}

}  // namespace

Schedule generate(Kind kind, const Config& config) {
  switch (kind) {
    case Kind::kSequential:
      return sequential(config);
    case Kind::kPipelined:
      return pipelined(config);
    case Kind::kGrouped:
      return grouped(config);
    case Kind::kInterleaved:
      return interleaved(config);
  }
  throw InternalError("schedule: not a kind");
}

Kind kind_called(const std::string& name) {
  if (name == "sequential") return Kind::kSequential;
  if (name == "pipelined") return Kind::kPipelined;
  if (name == "grouped") return Kind::kGrouped;
  if (name == "interleaved") return Kind::kInterleaved;
  throw UserError(join("schedule: '", name,
                       "' is not known; known are 'sequential', 'pipelined', "
                       "'grouped' and 'interleaved'"));
}

}  // namespace popsim::schedule
