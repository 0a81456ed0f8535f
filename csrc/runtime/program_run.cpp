#include "runtime/program_run.h"

#include "base/check.h"
#include "ops/host_code.h"
#include "runtime/closed_memory.h"
#include "runtime/plain_kernels.h"

namespace popsim::runtime {
namespace {

using schedule::Action;
using schedule::ActionKind;

// The elements of feeds that a run holds; all are released when the run ends,
// unless they are kept.
class HeldElements {
 public:
  HeldElements(const Call& call, int64_t first_micro_batch)
      : feeds_(call.feeds) {
    for (Feed* feed : feeds_) feed->begin_run(&call.stop, first_micro_batch);
  }
  HeldElements(const HeldElements&) = delete;
  HeldElements& operator=(const HeldElements&) = delete;
  ~HeldElements() {
    for (Feed* feed : feeds_) feed->end_run();
  }
  // Leaves them for a run that continues this one.
  void keep() { feeds_ = {}; }

 private:
  std::span<Feed* const> feeds_;
};

Stopped stopped(int64_t num_iterations, const Plan& plan) {
  return Stopped(join("run: stopped after ", num_iterations, " of ",
                      plan.loop().device_iterations, " device iterations"));
}

}  // namespace

ProgramRun::ProgramRun(const Plan& plan, const Plan* observed)
    : plan_(plan),
      plain_(plan, nullptr),
      observed_(observed == nullptr
                    ? nullptr
                    : std::make_unique<Version>(*observed, &plain_)),
      at_hand_(&plain_),
      checkpoint_(plan) {}

void ProgramRun::load(std::span<Listener* const> listeners) {
  const PlainKernels plain;
  plain_.load(listeners);
  if (observed_) observed_->load({});
}

void ProgramRun::run(const Call& call) {
  const PlainKernels plain;
  ended_ = false;
  feed_end_ = nullptr;
  last_micro_batch_.store(0, std::memory_order_relaxed);
  plain_.begin_run(call, num_iterations_, &ended_, &checks_);
  if (observed_) observed_->begin_run(call, num_iterations_, &ended_, &checks_);
  HeldElements held(call,
                    call.first_iteration * plan_.loop().gradient_accumulation);
  try {
    run_iterations(call);
  } catch (const ops::BadNumber&) {
    if (plan_.keeps_elements()) held.keep();
    throw;
  }
}

void ProgramRun::run_iterations(const Call& call) {
  const int64_t times = plan_.training() ? plan_.loop().device_iterations : 1;
  for (int64_t i = call.first_iteration; i < times && !ended_; ++i) {
    const int64_t first_step = step_;
    checks_.on = i != call.unchecked_iteration;
    checks_.copies.clear();
    checks_.noticed = nullptr;
    for (const auto& outlet : call.once) {
      outlet->begin_iteration(/*again=*/!checks_.on);
    }
    try {
      run_in_turn(call, i);
      // In inference each micro-batch is one device iteration.
      num_iterations_ += plan_.training() ? 1 : num_finished_;
    } catch (const ops::HostFailure&) {
      give_up(first_step);
      throw;
    } catch (const FeedEnd&) {
      give_up(first_step);
      throw;
    } catch (const Stopped&) {
      throw;
    } catch (const ops::BadNumber&) {
      // They begin again, or are left out.
      num_begun_.store(num_begun_ - (step_ - first_step),
                       std::memory_order_relaxed);
      give_up(first_step);
      step_ = first_step;
      bad_iteration_ = i;
      throw;
    } catch (const UserError&) {
      // In other programs, whether the iteration is discarded would depend on
      // the time that it takes.
      if (plan_.waits_in_iteration() || plan_.updates_in_iteration()) {
        give_up(first_step);
      }
      throw;
    }
  }
}

void ProgramRun::run_in_turn(const Call& call, int64_t iteration) {
  at_hand_ = &plain_;
  // Listeners know the ops of the plain version.
  if (!observed_ || !call.listeners.empty()) {
    run_iteration(call, iteration);
    return;
  }
  // A discarded iteration comes again under the same number.
  const int64_t turn = plan_.training() ? num_iterations_ : num_turns_++;
  const bool observed = pace_.observes(turn);
  if (observed) at_hand_ = observed_.get();
  if (!pace_.asks_for_times()) {
    run_iteration(call, iteration);
    return;
  }
  const auto began = Pace::Clock::now();
  run_iteration(call, iteration);
  pace_.note(turn, observed, Pace::Clock::now() - began);
}

void ProgramRun::skip_iteration() {
  const int64_t accumulation = plan_.loop().gradient_accumulation;
  step_ += accumulation;
  num_begun_.store(num_begun_ + accumulation, std::memory_order_relaxed);
  ++num_iterations_;
}

void ProgramRun::run_iteration(const Call& call, int64_t iteration) {
  const int64_t first_step = step_;
  num_finished_ = 0;
  if (plan_.training()) checkpoint_.begin(plain_.memories);
  // Long ops may stop only if the device iteration can be discarded.
  const bool may_stop = !plan_.training() || checkpoint_.complete();
  Lanes& lanes = at_hand_->lanes;
  const LaneTeam& team = at_hand_->team;
  const bool parallel = team.can_run(call);
  if (call.timeline) call.timeline->note_threads(parallel);
  for (size_t r = 0; r < lanes.size(); ++r) {
    for (size_t i = 0; i < lanes[r].size(); ++i) {
      // The sign is for the thread of the caller.
      const bool asks = may_stop && (!parallel || team.is_of_caller(r, i));
      lanes[r][i]->let_stop(asks ? &call.stop : nullptr);
    }
  }
  if (parallel) {
    run_lanes(call, iteration, first_step);
    if (plan_.training()) {
      run_action(call, {ActionKind::kUpdate, 0, 0}, iteration, first_step);
    }
    return;
  }
  for (const schedule::Stretch& stretch : plan_.schedule()) {
    for (int64_t time = 0; time < stretch.times; ++time) {
      for (const Action& first : stretch.actions) {
        const Action action = schedule::further(first, time);
        if ((call.stop.up() || feed_end_) &&
            end_before(action, iteration, first_step)) {
          continue;
        }
        run_action(call, action, iteration, first_step);
        if (ended(first_step)) return;
      }
    }
  }
}

void ProgramRun::run_lanes(const Call& call, int64_t iteration,
                           int64_t first_step) {
  using Verdict = LaneTeam::Verdict;
  if (call.stop.up()) throw stopped(plan_.training() ? iteration : 0, plan_);
  const int64_t begun_before = num_begun();
  const auto note = [&](int64_t begun, int64_t last) {
    num_begun_.store(begun_before + begun, std::memory_order_relaxed);
    last_micro_batch_.store(
        iteration * plan_.loop().gradient_accumulation + last,
        std::memory_order_relaxed);
  };
  const LaneTeam::Caller caller{
      .asks =
          [&] {
            if (!call.stop.up()) return Verdict::kGoOn;
            if (!plan_.training()) return Verdict::kFinish;
            return checkpoint_.complete() ? Verdict::kAbandon : Verdict::kGoOn;
          },
      .begins = [&](int64_t begun) { note(begun, begun - 1); }};
  const LaneTeam::Outcome outcome =
      at_hand_->team.run(call, iteration, key(first_step), caller);
  step_ = first_step + outcome.num_begun;
  note(outcome.num_begun, outcome.last_micro_batch);
  if (outcome.error) std::rethrow_exception(outcome.error);
  if (outcome.feed_end) {
    last_micro_batch_.store(outcome.num_begun, std::memory_order_relaxed);
    num_finished_ = outcome.num_begun;
    std::rethrow_exception(outcome.feed_end);
  }
  if (outcome.abandoned) {
    give_up(first_step);
    throw stopped(plan_.training() ? iteration : outcome.num_finished, plan_);
  }
  num_finished_ = outcome.num_begun;
  const int64_t all = plan_.training() ? plan_.loop().gradient_accumulation
                                       : plan_.loop().device_iterations;
  if (num_finished_ < all) throw stopped(num_finished_, plan_);
}

bool ProgramRun::end_before(const Action& action, int64_t iteration,
                            int64_t first_step) {
  const int64_t num_begun = step_ - first_step;
  if (!plan_.training()) {
    // Each micro-batch is a device iteration, so those in flight are finished
    // first.
    if (num_finished_ == num_begun) {
      if (feed_end_) {
        last_micro_batch_.store(num_begun, std::memory_order_relaxed);
        std::rethrow_exception(feed_end_);
      }
      throw stopped(num_begun, plan_);
    }
    return action.micro_batch >= num_begun;
  }
  if (num_begun > 0) {
    const bool nearly_over = action.kind == ActionKind::kUpdate;
    if (nearly_over || !give_up(first_step)) return false;
  }
  throw stopped(iteration, plan_);
}

bool ProgramRun::give_up(int64_t first_step) {
  if (!plan_.training() || !checkpoint_.complete()) return false;
  checkpoint_.restore(plain_.memories);
  step_ = first_step;
  return true;
}

void ProgramRun::run_action(const Call& call, const Action& action,
                            int64_t iteration, int64_t first_step) {
  const int64_t accumulation = plan_.loop().gradient_accumulation;
  last_micro_batch_.store(
      iteration * accumulation + (action.kind == ActionKind::kUpdate
                                      ? accumulation - 1
                                      : action.micro_batch),
      std::memory_order_relaxed);
  try {
    if (action.kind == ActionKind::kUpdate) {
      update(call, action, iteration);
      for (Feed* feed : call.feeds) {
        feed->release_before((iteration + 1) * accumulation);
      }
      return;
    }
    const int64_t mb = action.micro_batch;
    const int64_t index = iteration * accumulation + mb;
    if (step_ <= first_step + mb) {
      if (!take_elements(call, index, step_ - first_step)) return;
      step_ = first_step + mb + 1;
      num_begun_.store(num_begun_ + 1, std::memory_order_relaxed);
    }
    const auto lane = static_cast<size_t>(
        at_hand_->plan.lane_of_stage()[static_cast<size_t>(action.stage)]);
    const Lanes& lanes = at_hand_->lanes;
    for (size_t r = 0; r < lanes.size(); ++r) {
      lanes[r][lane]->run(
          call, action,
          plan_.cursor(iteration, mb, key(first_step), static_cast<int64_t>(r)),
          index);
    }
    release_inputs(call, action, index);
  } catch (const Stopped&) {
    give_up(first_step);
    throw stopped(plan_.training() ? iteration : num_finished_, plan_);
  }
  if (action.stage + 1 == plan_.graph().num_stages()) {
    num_finished_ = action.micro_batch + 1;
  }
}

void ProgramRun::update(const Call& call, const Action& action,
                        int64_t iteration) {
  // It may read the inputs and the values of the last micro-batch.
  const int64_t accumulation = plan_.loop().gradient_accumulation;
  const int64_t index = (iteration + 1) * accumulation - 1;
  // All replicas draw the same random numbers for a value that they share.
  const auto cursor = [&](size_t replica) -> ops::Cursor {
    return {iteration, accumulation - 1, step() - 1,
            static_cast<int64_t>(replica)};
  };
  const Plan& plan = at_hand_->plan;
  const Lanes& lanes = at_hand_->lanes;
  if (lanes.size() == 1) {
    lanes[0][0]->run(call, action, cursor(0), index);
    return;
  }
  const auto began = Timeline::now(call.timeline);
  for (size_t r = 0; r < lanes.size(); ++r) {
    lanes[r][0]->begin(call, action, cursor(r), index);
  }
  const std::vector<Groups>& updaters = plan.updaters();
  const std::vector<int64_t>& update = plan.blocks().back().ops;
  for (size_t i = 0; i < updaters.size(); ++i) {
    const graph::Op& op = plan.graph().ops()[static_cast<size_t>(update[i])];
    const OpenReplicas open(plan.graph(), at_hand_->memories, op);
    for (size_t r = 0; r < lanes.size(); ++r) {
      if (updaters[i][r] == static_cast<int32_t>(r)) {
        lanes[r][0]->run_update(i);
      }
    }
  }
  if (call.timeline) call.timeline->note(action, 0, index, began);
}

void ProgramRun::release_inputs(const Call& call, const Action& action,
                                int64_t micro_batch) {
  const int64_t accumulation = plan_.loop().gradient_accumulation;
  const bool is_last =
      plan_.training()
          ? action.kind == ActionKind::kBackward && action.stage == 0
          : action.stage + 1 == plan_.graph().num_stages();
  // The update may read the inputs of the last micro-batch.
  const bool waits = plan_.training() && action.micro_batch + 1 == accumulation;
  if (!is_last || waits || plan_.keeps_elements()) return;
  for (Feed* feed : call.feeds) feed->release_before(micro_batch + 1);
}

bool ProgramRun::take_elements(const Call& call, int64_t micro_batch,
                               int64_t num_begun) {
  const bool some_in_flight = !plan_.training() && num_finished_ < num_begun;
  try {
    for (Feed* feed : call.feeds) feed->take(micro_batch);
  } catch (const FeedEnd&) {
    if (!some_in_flight) throw;
    feed_end_ = std::current_exception();
    return false;
  } catch (const Stopped&) {
    if (!some_in_flight) throw;
    return false;
  }
  return true;
}

}  // namespace popsim::runtime
