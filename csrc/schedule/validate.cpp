#include <vector>

#include "base/check.h"
#include "schedule/action.h"

namespace popsim::schedule {
namespace {

int32_t slot_of(const Action& action, int32_t num_stages) {
  return action.kind == ActionKind::kForward
             ? action.stage
             : 2 * num_stages - 1 - action.stage;
}

// Goes through a schedule, and checks that each action may come next.
class Checker {
 public:
  Checker(const Schedule& schedule, const Config& config)
      : schedule_(schedule),
        config_(config),
        passed_(static_cast<size_t>(config.training ? 2 * config.num_stages
                                                    : config.num_stages)) {}

  void take(const Stretch& stretch) {
    const std::vector<int64_t> before = passed_;
    for (const Action& action : stretch.actions) take(action);
    if (stretch.times == 1) return;
    // If every slot is one micro-batch later, the second repetition is like the
    // first, and so on to the last one.
    bool steady = stretch.times > 1 && !stretch.actions.empty() && !updated_;
    for (size_t slot = 0; slot < passed_.size(); ++slot) {
      steady = steady && passed_[slot] == before[slot] + 1;
      passed_[slot] += stretch.times - 1;
    }
    if (!steady) {
      fail("a stretch that repeats ", stretch.times,
           " times must contain every action of one micro-batch once");
    }
    if (passed_.front() > config_.num_micro_batches) {
      fail("a stretch repeats ", stretch.times, " times, which is too many");
    }
  }

  void finish() const {
    if (passed_.back() < config_.num_micro_batches) {
      fail("micro-batch ", passed_.back(), " is not finished");
    }
    if (config_.training && !updated_) fail("the update is missing");
    if (updated_ && !config_.training) {
      fail("inference must have no update");
    }
  }

 private:
  void take(const Action& action) {
    if (updated_) fail(to_string(action), " comes after the update");
    if (action.kind == ActionKind::kUpdate) {
      updated_ = true;
      return;
    }
    const int32_t slot = slot_of(action, config_.num_stages);
    const bool exists =
        action.stage >= 0 && action.stage < config_.num_stages &&
        (config_.training || action.kind == ActionKind::kForward) &&
        action.micro_batch < config_.num_micro_batches;
    const auto k = static_cast<size_t>(slot);
    // The slots of a micro-batch run in order, and each slot takes the
    // micro-batches in order.
    if (!exists || passed_[k] != action.micro_batch ||
        (k > 0 && passed_[k - 1] <= action.micro_batch)) {
      fail(to_string(action), " is out of order");
    }
    ++passed_[k];
  }

  template <typename... Parts>
  [[noreturn]] void fail(const Parts&... what) const {
    throw InternalError(
        join("schedule: ", what..., " in ", to_string(schedule_)));
  }

  const Schedule& schedule_;
  const Config& config_;
  std::vector<int64_t> passed_;  // number of micro-batches, by slot
  bool updated_ = false;
};

}  // namespace

void validate(const Schedule& schedule, const Config& config) {
  Checker checker(schedule, config);
  for (const Stretch& stretch : schedule) checker.take(stretch);
  checker.finish();
}

}  // namespace popsim::schedule
