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

void finish(const Config& config, ActionList& actions) {
  if (config.training) actions.push_back({ActionKind::kUpdate, 0, 0});
}

}  // namespace

ActionList sequential(const Config& config) {
  ActionList actions;
  for (int64_t mb = 0; mb < config.num_micro_batches; ++mb) {
    for (int32_t slot = 0; slot < num_slots(config); ++slot) {
      actions.push_back(slot_action(config, slot, mb));
    }
  }
  finish(config, actions);
  return actions;
}

ActionList pipelined(const Config& config) {
  ActionList actions;
  // The last forward and the first backward share a time slot: both run on the
  // last stage, one after the other.
  const int32_t depth =
      config.training ? 2 * config.num_stages - 1 : config.num_stages;
  const int64_t end = config.num_micro_batches + depth - 1;
  for (int64_t time = 0; time < end; ++time) {
    // Later slots first: they free the stashes that earlier ones fill.
    for (int32_t position = depth - 1; position >= 0; --position) {
      const int64_t mb = time - position;
      if (mb < 0 || mb >= config.num_micro_batches) continue;
      const bool turn = config.training && position == config.num_stages - 1;
      const bool back = position >= config.num_stages;
      actions.push_back(
          slot_action(config, back ? position + 1 : position, mb));
      if (turn) actions.push_back(slot_action(config, position + 1, mb));
    }
  }
  finish(config, actions);
  return actions;
}

ActionList generate(const std::string& name, const Config& config) {
  if (name == "sequential") return sequential(config);
  if (name == "pipelined") return pipelined(config);
  throw UserError(join("schedule: '", name,
                       "' is not known; known are 'sequential' and "
                       "'pipelined'"));
}

}  // namespace popsim::schedule
