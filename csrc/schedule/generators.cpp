#include <algorithm>
#include <initializer_list>

#include "base/check.h"
#include "schedule/action.h"

namespace popsim::schedule {
namespace {

// Slot k of a micro-batch's way through the pipeline: forward of stages
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

// The stretches that do something, and the update where there is one.
Schedule join_stretches(const Config& config,
                        std::initializer_list<Stretch> stretches) {
  Schedule schedule;
  for (const Stretch& stretch : stretches) {
    if (stretch.times > 0 && !stretch.actions.empty()) {
      schedule.push_back(stretch);
    }
  }
  if (config.training) {
    schedule.push_back({.actions = {{ActionKind::kUpdate, 0, 0}}});
  }
  return schedule;
}

// One time slot of a pipeline: what every stage does at `time`.
class TimeSlot {
 public:
  explicit TimeSlot(const Config& config) : config_(config) {}

  // The last forward and the first backward share a position: both run on the
  // last stage, one after the other.
  [[nodiscard]] int32_t num_positions() const {
    return config_.training ? 2 * config_.num_stages - 1 : config_.num_stages;
  }
  void append(int64_t time, ActionList& actions) const {
    // Later positions first: they free the stashes that earlier ones fill.
    for (int32_t position = num_positions() - 1; position >= 0; --position) {
      const int64_t mb = time - position;
      if (mb < 0 || mb >= config_.num_micro_batches) continue;
      const bool turn = config_.training && position == config_.num_stages - 1;
      const bool back = position >= config_.num_stages;
      actions.push_back(
          slot_action(config_, back ? position + 1 : position, mb));
      if (turn) actions.push_back(slot_action(config_, position + 1, mb));
    }
  }

 private:
  const Config& config_;
};

}  // namespace

Schedule sequential(const Config& config) {
  Stretch way{.times = config.num_micro_batches};
  for (int32_t slot = 0; slot < num_slots(config); ++slot) {
    way.actions.push_back(slot_action(config, slot, 0));
  }
  return join_stretches(config, {way});
}

Schedule pipelined(const Config& config) {
  const TimeSlot slot(config);
  const int64_t full = slot.num_positions() - 1;  // the first time it is
  Stretch fill;
  Stretch steady{.times = config.num_micro_batches - full};
  Stretch drain;
  for (int64_t time = 0; time < full; ++time) slot.append(time, fill.actions);
  slot.append(full, steady.actions);
  // Where there are too few micro-batches, it drains before it was full.
  const int64_t end = config.num_micro_batches + full;
  for (int64_t time = std::max(full, config.num_micro_batches); time < end;
       ++time) {
    slot.append(time, drain.actions);
  }
  return join_stretches(config, {fill, steady, drain});
}

Schedule generate(const std::string& name, const Config& config) {
  if (name == "sequential") return sequential(config);
  if (name == "pipelined") return pipelined(config);
  throw UserError(join("schedule: '", name,
                       "' is not known; known are 'sequential' and "
                       "'pipelined'"));
}

}  // namespace popsim::schedule
