#include "runtime/lane_team.h"

#include <algorithm>
#include <cfenv>
#include <limits>
#include <string>
#include <thread>
#include <utility>

#include "base/check.h"
#include "runtime/plain_kernels.h"
#include "runtime/texts.h"
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
  int64_t num_begun = 0;  // for the caller's thread
  Texts<Position> texts;  // what actions print
  // An action failed. Those before it in the order of the schedule still run:
  // one of them may fail, too.
  std::atomic<bool> has_failed = false;
  std::mutex mutex;  // for what follows
  std::exception_ptr error;
  Position failed{};
  int64_t failed_micro_batch = 0;
  std::exception_ptr feed_end;  // of the caller's thread

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

LaneTeam::LaneTeam(const Plan& plan, Lanes& lanes)
    : plan_(plan),
      lanes_(lanes),
      stretches_(static_cast<size_t>(plan.num_lanes())),
      progress_(
          static_cast<size_t>(plan.num_teams()) * plan.blocks().size() + 1,
          plan.num_teams() * plan.num_lanes() <=
              static_cast<int64_t>(std::thread::hardware_concurrency())),
      begun_(static_cast<size_t>(plan.num_teams()) * plan.blocks().size()),
      crew_(plan.num_teams() * plan.num_lanes() - 1) {
  const auto num_teams = static_cast<size_t>(plan.num_teams());
  for (size_t team = 0; team < num_teams; ++team) {
    for (size_t lane = 0; lane < stretches_.size(); ++lane) {
      workers_.push_back({team, lane, team * lanes.size() / num_teams,
                          (team + 1) * lanes.size() / num_teams});
    }
  }
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
  return workers_.size() > 1 && call.listeners.empty() &&
         threads::budget() >= std::ssize(workers_);
}

bool LaneTeam::is_of_caller(size_t replica, size_t lane) const {
  return lane == 0 && replica < workers_[0].last_replica;
}

void LaneTeam::let_wait(size_t worker, ops::Patience* patience) {
  const Worker& own = workers_[worker];
  for (size_t r = own.first_replica; r < own.last_replica; ++r) {
    lanes_[r][own.lane]->let_wait(patience);
  }
}

LaneTeam::Outcome LaneTeam::run(const Call& call, int64_t iteration,
                                int64_t first_key, const Caller& caller) {
  Iteration shared{.call = call,
                   .caller = caller,
                   .number = iteration,
                   .first_key = first_key,
                   .texts = Texts<Position>(workers_.size())};
  progress_.reset();
  const int64_t share =
      std::max<int64_t>(1, threads::budget() / std::ssize(workers_));
  std::fenv_t rounding;  // and whether small numbers are flushed to zero
  std::fegetenv(&rounding);
  LanePatience patience(call.stop, shared.abandoned);
  for (size_t i = 1; i < workers_.size(); ++i) let_wait(i, &patience);
  const std::function<void(int64_t)> help = [&](int64_t i) {
    std::fesetenv(&rounding);
    const PlainKernels plain;
    const threads::ScopedBudget own(share);
    work(workers_[static_cast<size_t>(i) + 1], shared);
  };
  crew_.start(help);
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
    work(workers_[0], shared);
  });
  crew_.join([&] {
    guarded([&] {
      if (caller.asks() == Verdict::kAbandon) shared.abandoned = true;
    });
  });
  for (size_t i = 1; i < workers_.size(); ++i) let_wait(i, &call.stop);
  shared.texts.finish();
  if (of_caller) std::rethrow_exception(of_caller);
  Outcome outcome{.error = shared.error,
                  .feed_end = shared.feed_end,
                  .num_begun = shared.num_begun};
  outcome.num_finished = num_finished();
  outcome.last_micro_batch = std::max<int64_t>(shared.num_begun - 1, 0);
  if (shared.error) {
    // A micro-batch without data has not begun.
    outcome.num_begun =
        std::min(shared.num_begun, num_begun_until(shared.failed));
    outcome.last_micro_batch = shared.failed_micro_batch;
  } else {
    outcome.abandoned = shared.abandoned;
  }
  return outcome;
}

void LaneTeam::work(const Worker& worker, Iteration& iteration) {
  const std::vector<Stretch>& stretches = stretches_[worker.lane];
  for (size_t s = 0; s < stretches.size(); ++s) {
    const Stretch& stretch = stretches[s];
    if (stretch.steps.empty()) continue;
    for (int64_t time = 0; time < stretch.times; ++time) {
      for (const Step& step : stretch.steps) {
        const Position position{s, time, step.position, worker.first_replica};
        if (!run_step(worker, step, position, iteration)) return;
      }
    }
  }
}

bool LaneTeam::run_step(const Worker& worker, const Step& step,
                        Position position, Iteration& iteration) {
  const bool is_caller = &worker == workers_.data();
  const Action action = schedule::further(step.action, position.time);
  const int64_t mb = action.micro_batch;
  const auto goes_on = [&] {
    if (is_caller) {
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
    if (!progress_.wait(counter(worker.team, wait.block),
                        mb - wait.distance + 1, goes_on)) {
      return leaves_out();
    }
  }
  const bool begins = step.block == 0;
  if (begins && is_caller) {
    try {
      const int64_t accumulation = plan_.loop().gradient_accumulation;
      if (!take_elements(iteration, iteration.number * accumulation + mb)) {
        return true;
      }
    } catch (const Stopped&) {
      iteration.abandoned = true;
      return false;
    } catch (...) {
      note_error(position, mb, iteration);
      return false;
    }
    iteration.num_begun = mb + 1;
    iteration.caller.begins(mb + 1);
    progress_.raise(begun_, mb + 1);
  } else if (begins && !progress_.wait(begun_, mb + 1, goes_on)) {
    return leaves_out();
  }
  if (!run_action(worker, action, position, iteration)) return false;
  progress_.raise(counter(worker.team, step.block), mb + 1);
  release_elements(step.block, iteration);
  return true;
}

bool LaneTeam::run_action(const Worker& worker, const Action& action,
                          Position& position, Iteration& iteration) {
  const int64_t mb = action.micro_batch;
  const int64_t accumulation = plan_.loop().gradient_accumulation;
  const int64_t index = iteration.number * accumulation + mb;
  std::string text;
  bool done = false;
  try {
    const threads::ScopedOutput output(text);
    for (size_t r = worker.first_replica; r < worker.last_replica; ++r) {
      position.replica = r;
      lanes_[r][worker.lane]->run(
          iteration.call, action,
          plan_.cursor(iteration.number, mb, iteration.first_key,
                       static_cast<int64_t>(r)),
          index);
    }
    done = true;
  } catch (const Stopped&) {
    iteration.abandoned = true;
  } catch (...) {
    note_error(position, mb, iteration);
  }
  iteration.texts.add(static_cast<size_t>(&worker - workers_.data()), position,
                      std::move(text));
  return done;
}

void LaneTeam::note_error(const Position& position, int64_t micro_batch,
                          Iteration& iteration) const {
  const std::lock_guard lock(iteration.mutex);
  if (!iteration.error || position < iteration.failed) {
    iteration.error = std::current_exception();
    iteration.failed = position;
    iteration.failed_micro_batch = micro_batch;
  }
  iteration.has_failed = true;
  iteration.texts.fail(position);
}

bool LaneTeam::take_elements(Iteration& iteration, int64_t index) const {
  const auto finish = [&] {
    iteration.limit = std::min(iteration.limit.load(), iteration.num_begun);
    return false;
  };
  const bool others_finish = !plan_.training() && iteration.num_begun > 0;
  try {
    for (Feed* feed : iteration.call.feeds) feed->take(index);
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

int64_t LaneTeam::num_finished() const {
  int64_t least = std::numeric_limits<int64_t>::max();
  for (size_t team = 0; team <= workers_.back().team; ++team) {
    for (const size_t block : plan_.last_blocks()) {
      least = std::min(least, progress_[counter(team, block)]);
    }
  }
  return least;
}

void LaneTeam::release_elements(size_t block,
                                const Iteration& iteration) const {
  const std::vector<size_t>& last = plan_.last_blocks();
  if (iteration.call.feeds.empty() || plan_.keeps_elements() ||
      std::ranges::find(last, block) == last.end())
    return;
  const int64_t accumulation = plan_.loop().gradient_accumulation;
  int64_t finished = num_finished();
  // The update may read the inputs of the last micro-batch.
  if (plan_.training()) finished = std::min(finished, accumulation - 1);
  for (Feed* feed : iteration.call.feeds) {
    feed->release_before(iteration.number * accumulation + finished);
  }
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
