#include <algorithm>
#include <map>
#include <set>

#include "base/check.h"
#include "schedule/action.h"

namespace popsim::schedule {
namespace {

int32_t slot_of(const Action& action, int32_t num_stages) {
  return action.kind == ActionKind::kForward
             ? action.stage
             : 2 * num_stages - 1 - action.stage;
}

[[noreturn]] void fail(const Action& action, const char* what,
                       const ActionList& actions) {
  throw InternalError(join("schedule: ", to_string(action), " ", what, " in ",
                           to_string(actions)));
}

}  // namespace

void validate(const ActionList& actions, const Config& config) {
  const int32_t slots =
      config.training ? 2 * config.num_stages : config.num_stages;
  // The next slot each micro-batch waits for; slots of one micro-batch run in
  // order, and a stage takes its micro-batches in order.
  std::vector<int32_t> next(static_cast<size_t>(config.num_micro_batches), 0);
  std::map<int32_t, int64_t> next_micro_batch;
  bool updated = false;
  for (const Action& action : actions) {
    if (updated) fail(action, "comes after the update", actions);
    if (action.kind == ActionKind::kUpdate) {
      updated = true;
      continue;
    }
    const int32_t slot = slot_of(action, config.num_stages);
    const bool exists =
        action.stage >= 0 && action.stage < config.num_stages &&
        (config.training || action.kind == ActionKind::kForward) &&
        action.micro_batch >= 0 &&
        action.micro_batch < config.num_micro_batches && slot < slots;
    if (!exists || next.at(action.micro_batch) != slot ||
        next_micro_batch[slot] != action.micro_batch) {
      fail(action, "is out of order", actions);
    }
    ++next.at(action.micro_batch);
    ++next_micro_batch[slot];
  }
  for (size_t mb = 0; mb < next.size(); ++mb) {
    if (next[mb] != slots) {
      throw InternalError(join("schedule: micro-batch ", mb,
                               " is not finished in ", to_string(actions)));
    }
  }
  if (updated != config.training) {
    throw InternalError(
        join("schedule: the update is missing in, or does not belong to, ",
             to_string(actions)));
  }
}

int64_t max_in_flight(const ActionList& actions) {
  std::map<int64_t, size_t> last;
  for (size_t i = 0; i < actions.size(); ++i) {
    if (actions[i].kind != ActionKind::kUpdate) {
      last[actions[i].micro_batch] = i;
    }
  }
  std::set<int64_t> live;
  size_t most = 1;
  for (size_t i = 0; i < actions.size(); ++i) {
    if (actions[i].kind == ActionKind::kUpdate) continue;
    live.insert(actions[i].micro_batch);
    most = std::max(most, live.size());
    if (last[actions[i].micro_batch] == i) live.erase(actions[i].micro_batch);
  }
  return static_cast<int64_t>(most);
}

}  // namespace popsim::schedule
