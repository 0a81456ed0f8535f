#include "runtime/stop.h"

#include <algorithm>

namespace popsim::runtime {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kBetweenQuestions{100};
// If ticks are closer together than this, more actions are counted between
// them.
constexpr milliseconds kShortTick{5};
constexpr milliseconds kLongTick{20};
constexpr int32_t kMaxActionsPerTick = 64;

}  // namespace

void StopSign::tick() {
  const Clock::time_point now = Clock::now();
  const Clock::duration elapsed = now - last_tick_;
  last_tick_ = now;
  if (elapsed < kShortTick) {
    actions_per_tick_ = std::min(2 * actions_per_tick_, kMaxActionsPerTick);
  } else if (elapsed > kLongTick) {
    actions_per_tick_ = 1;
  }
  countdown_ = actions_per_tick_;
  if (first_tick_) {
    first_tick_ = false;
    last_asked_ = now;
  } else if (overseer_ != nullptr && now - last_asked_ >= kBetweenQuestions) {
    last_asked_ = now;
    if (!overseer_->lets_it_go_on()) usage_.stop();
  }
}

}  // namespace popsim::runtime
