#include <algorithm>
#include <vector>

#include "base/check.h"
#include "schedule/action.h"

namespace popsim::schedule {
namespace {

// The number of positions of the pipeline: one for each stage, but only one for
// stages that are concurrent.
int32_t depth_of(const Config& config) {
  return position_of(config.positions, config.num_stages - 1) + 1;
}

int32_t num_slots(const Config& config) {
  return config.training ? 2 * depth_of(config) : depth_of(config);
}

// The slots on the way of micro-batch 0 through the pipeline: forward at
// positions 0..P-1, then backward at positions P-1..0. Concurrent stages run
// forward in ascending order, backward in descending order, like all others.
std::vector<ActionList> slots_of(const Config& config) {
  std::vector<ActionList> slots(static_cast<size_t>(num_slots(config)));
  const auto add = [&](ActionKind kind, int32_t stage, int32_t slot) {
    slots[static_cast<size_t>(slot)].push_back({kind, stage, 0});
  };
  for (int32_t stage = 0; stage < config.num_stages; ++stage) {
    add(ActionKind::kForward, stage, position_of(config.positions, stage));
  }
  for (int32_t stage = config.num_stages; config.training && stage-- > 0;) {
    add(ActionKind::kBackward, stage,
        num_slots(config) - 1 - position_of(config.positions, stage));
  }
  return slots;
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
  Rhythm rhythm{.positions = slots_of(config), .interval = interval};
  for (int32_t slot = 0; slot < num_slots(config); ++slot) {
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
    const auto turn = rhythm.positions.begin() + depth_of(config);
    (turn - 1)->insert((turn - 1)->end(), turn->begin(), turn->end());
    rhythm.positions.erase(turn);
    rhythm.order.erase(rhythm.order.begin());
  }
  return in_rhythm(config, rhythm);
}

Schedule grouped(const Config& config) {
  Rhythm rhythm = ring(config, 1);
  // All forward actions run first, then all backward actions.
  std::rotate(rhythm.order.begin(), rhythm.order.end() - depth_of(config),
              rhythm.order.end());
  return in_rhythm(config, rhythm);
}

Schedule interleaved(const Config& config) {
  // Two slots whose numbers differ by an odd number can belong to the same
  // device; the ring of inference has each device once.
  return in_rhythm(config, ring(config, config.training ? 2 : 1));
}

}  // namespace

void check_positions(const std::vector<int32_t>& positions,
                     int32_t num_stages) {
  bool right = positions.empty() || std::ssize(positions) >= num_stages;
  for (size_t i = 0; i < positions.size(); ++i) {
    const int32_t step =
        i == 0 ? positions[0] : positions[i] - positions[i - 1];
    right = right && step >= 0 && step <= (i == 0 ? 0 : 1);
  }
  check_user(right,
             "schedule: the positions of the stages must be one for each of ",
             num_stages,
             " stages, from 0 on, each the same as the one before or one more");
}

Schedule generate(Kind kind, const Config& config) {
  check_positions(config.positions, config.num_stages);
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
