#include "runtime/lane_team.h"

#include <algorithm>
#include <cfenv>
#include <limits>
#include <thread>
#include <tuple>

#include "base/check.h"
#include "runtime/plain_kernels.h"
#include "threads/budget.h"

namespace popsim::runtime {

using graph::Phase;
using schedule::Action;
using schedule::ActionKind;

// What the threads of an iteration share.
struct LaneTeam::Iteration {
  const Call& call;
  const Caller& caller;
  int64_t number;
  int64_t first_key;
  // No micro-batch from this one on begins.
  std::atomic<int64_t> limit = std::numeric_limits<int64_t>::max();
  // Everything is left as it is.
  std::atomic<bool> abandoned = false;
  int64_t num_begun = 0;  // of lane 0
  // An action failed. Those before it in the order of the schedule still run:
  // one of them may fail, too.
  std::atomic<bool> has_failed = false;
  std::mutex mutex;  // for what follows
  std::exception_ptr error;
  Position failed{};
  int64_t failed_micro_batch = 0;
  std::exception_ptr feed_end;  // of lane 0

  [[nodiscard]] bool is_after_failure(const Position& position) {
    if (!has_failed) return false;
    const std::lock_guard lock(mutex);
    return failed < position;
  }
};

namespace {

// Asked by ops that wait on a thread of the crew.
class LanePatience final : public ops::Patience {
 public:
  LanePatience(const StopSign& stop, const std::atomic<bool>& abandoned)
      : stop_(stop), abandoned_(abandoned) {}
  [[nodiscard]] bool lasts() override { return !stop_.known() && !abandoned_; }

 private:
  const StopSign& stop_;
  const std::atomic<bool>& abandoned_;
};

}  // namespace

LaneTeam::LaneTeam(const Plan& plan, std::vector<std::unique_ptr<Lane>>& lanes)
    : plan_(plan),
      lanes_(lanes),
      stretches_(lanes.size()),
      progress_(plan.blocks().size(),
                lanes.size() <= std::thread::hardware_concurrency()),
      crew_(std::ssize(lanes) - 1) {
  for (const schedule::Stretch& stretch : plan.schedule()) {
    for (auto& own : stretches_) own.push_back({{}, stretch.times});
    for (size_t i = 0; i < stretch.actions.size(); ++i) {
      const Action& action = stretch.actions[i];
      if (action.kind == ActionKind::kUpdate) continue;
      const auto lane = static_cast<size_t>(
          plan.lane_of_stage()[static_cast<size_t>(action.stage)]);
      stretches_[lane].back().steps.push_back({action, i, block_of(action)});
    }
  }
}

size_t LaneTeam::block_of(const Action& action) const {
  const Phase phase =
      action.kind == ActionKind::kForward ? Phase::kForward : Phase::kBackward;
  const std::vector<memory::Block>& blocks = plan_.blocks();
  const auto found = std::ranges::find_if(blocks, [&](const auto& block) {
    return block.phase == phase && block.stage == action.stage;
  });
  check_internal(found != blocks.end(), "lanes: no block of an action");
  return static_cast<size_t>(found - blocks.begin());
}

bool LaneTeam::can_run(const Call& call) const {
  return lanes_.size() > 1 && call.listeners.empty() &&
         threads::budget() >= std::ssize(lanes_);
}

LaneTeam::Outcome LaneTeam::run(const Call& call, int64_t iteration,
                                int64_t first_key, const Caller& caller) {
  Iteration shared{.call = call,
                   .caller = caller,
                   .number = iteration,
                   .first_key = first_key};
  progress_.reset();
  const int64_t share =
      std::max<int64_t>(1, threads::budget() / std::ssize(lanes_));
  std::fenv_t rounding;  // and whether small numbers are flushed to zero
  std::fegetenv(&rounding);
  LanePatience patience(call.stop, shared.abandoned);
  for (size_t i = 1; i < lanes_.size(); ++i) lanes_[i]->let_wait(&patience);
  const std::function<void(int64_t)> work = [&](int64_t i) {
    std::fesetenv(&rounding);
    const PlainKernels plain;
    const threads::ScopedBudget own(share);
    run_lane(static_cast<size_t>(i) + 1, shared);
  };
  crew_.start(work);
  // Whatever the caller throws waits until no thread uses `shared` any more.
  std::exception_ptr of_caller;
  const auto guarded = [&](const auto& part) {
    try {
      if (!of_caller) part();
    } catch (...) {
      of_caller = std::current_exception();
      shared.abandoned = true;
    }
  };
  guarded([&] {
    const threads::ScopedBudget own(share);
    run_lane(0, shared);
  });
  crew_.join([&] {
    guarded([&] {
      if (caller.asks() == Verdict::kAbandon) shared.abandoned = true;
    });
  });
  for (size_t i = 1; i < lanes_.size(); ++i) lanes_[i]->let_wait(&call.stop);
  if (of_caller) std::rethrow_exception(of_caller);
  Outcome outcome{.error = shared.error,
                  .feed_end = shared.feed_end,
                  .num_begun = shared.num_begun};
  outcome.num_finished = progress_[static_cast<size_t>(
      (plan_.training() ? 2 : 1) * plan_.graph().num_stages() - 1)];
  outcome.last_micro_batch = std::max<int64_t>(shared.num_begun - 1, 0);
  if (shared.error) {
    outcome.num_begun = num_begun_until(shared.failed);
    outcome.last_micro_batch = shared.failed_micro_batch;
  } else {
    outcome.abandoned = shared.abandoned;
  }
  return outcome;
}

void LaneTeam::run_lane(size_t lane, Iteration& iteration) {
  for (size_t s = 0; s < stretches_[lane].size(); ++s) {
    const Stretch& stretch = stretches_[lane][s];
    if (stretch.steps.empty()) continue;
    for (int64_t time = 0; time < stretch.times; ++time) {
      for (const Step& step : stretch.steps) {
        const Position position{s, time, step.position};
        if (!run_step(lane, step, position, iteration)) return;
      }
    }
  }
}

bool LaneTeam::run_step(size_t lane, const Step& step, const Position& position,
                        Iteration& iteration) {
  const Action action = schedule::further(step.action, position.time);
  const int64_t mb = action.micro_batch;
  const auto goes_on = [&] {
    if (lane == 0) {
      switch (iteration.caller.asks()) {
        case Verdict::kGoOn:
          break;
        case Verdict::kFinish:
          iteration.limit =
              std::min(iteration.limit.load(), iteration.num_begun);
          break;
        case Verdict::kAbandon:
          iteration.abandoned = true;
          break;
      }
    }
    return !iteration.abandoned && mb < iteration.limit &&
           !iteration.is_after_failure(position);
  };
  // A micro-batch that does not begin is left out: others may be in flight.
  const auto leaves_out = [&] { return mb >= iteration.limit; };
  if (!goes_on()) return leaves_out();
  for (const memory::Wait& wait : plan_.waits()[step.block]) {
    if (!progress_.wait(wait.block, mb - wait.distance + 1, goes_on)) {
      return leaves_out();
    }
  }
  const ops::LoopCounts loop = plan_.loop();
  const int64_t index = iteration.number * loop.gradient_accumulation + mb;
  const ops::Cursor cursor{plan_.training() ? iteration.number : mb,
                           plan_.training() ? mb : 0,
                           iteration.first_key + mb * plan_.num_processes()};
  try {
    if (step.block == 0) {
      if (!take_elements(iteration, index)) return true;
      iteration.num_begun = mb + 1;
      iteration.caller.begins(mb + 1);
    }
    lanes_[lane]->run(iteration.call, action, cursor, index);
    release_elements(action, iteration, index);
  } catch (const Stopped&) {
    iteration.abandoned = true;
    return false;
  } catch (...) {
    const std::lock_guard lock(iteration.mutex);
    if (!iteration.error || position < iteration.failed) {
      iteration.error = std::current_exception();
      iteration.failed = position;
      iteration.failed_micro_batch = mb;
    }
    iteration.has_failed = true;
    return false;
  }
  progress_.raise(step.block, mb + 1);
  return true;
}

bool LaneTeam::take_elements(Iteration& iteration, int64_t index) const {
  const auto finish = [&] {
    iteration.limit = std::min(iteration.limit.load(), iteration.num_begun);
    return false;
  };
  const bool others_finish = !plan_.training() && iteration.num_begun > 0;
  try {
    for (Feed* feed : iteration.call.feeds) std::ignore = feed->element(index);
  } catch (const FeedEnd&) {
    if (!others_finish) throw;
    iteration.feed_end = std::current_exception();
    return finish();
  } catch (const Stopped&) {
    if (!others_finish) throw;
    return finish();
  }
  return true;
}

void LaneTeam::release_elements(const Action& action,
                                const Iteration& iteration,
                                int64_t index) const {
  const bool is_last =
      plan_.training()
          ? action.kind == ActionKind::kBackward && action.stage == 0
          : action.stage + 1 == plan_.graph().num_stages();
  // The update may read the inputs of the last micro-batch.
  const bool waits = plan_.training() && action.micro_batch + 1 ==
                                             plan_.loop().gradient_accumulation;
  if (!is_last || waits) return;
  for (Feed* feed : iteration.call.feeds) feed->release_before(index + 1);
}

int64_t LaneTeam::num_begun_until(const Position& position) const {
  int64_t begun = 0;
  const schedule::Schedule& schedule = plan_.schedule();
  for (size_t s = 0; s <= position.stretch; ++s) {
    for (size_t i = 0; i < schedule[s].actions.size(); ++i) {
      const Action& first = schedule[s].actions[i];
      if (first.kind != ActionKind::kForward || first.stage != 0) continue;
      int64_t times = schedule[s].times;
      if (s == position.stretch) {
        times = position.time + (i <= position.action ? 1 : 0);
      }
      begun += times;
    }
  }
  return begun;
}

}  // namespace popsim::runtime
