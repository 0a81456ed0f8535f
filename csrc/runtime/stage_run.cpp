#include "runtime/stage_run.h"

#include <c10/core/DispatchKeySet.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <tuple>

#include "base/check.h"
#include "ops/host_code.h"

namespace popsim::runtime {
namespace {

using graph::Op;
using graph::Phase;
using graph::TensorId;
using schedule::Action;
using schedule::ActionKind;

// Kernels of PyTorch run as they are called: they record nothing for gradients
// and use the dtypes of the program, whatever torch.autocast would choose.
struct PlainKernels {
  c10::InferenceMode no_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

// The elements of feeds that a run holds; all are released when the run ends.
class HeldElements {
 public:
  explicit HeldElements(const Call& call) : feeds_(call.feeds) {
    for (Feed* feed : feeds_) feed->begin_run(&call.stop);
  }
  HeldElements(const HeldElements&) = delete;
  HeldElements& operator=(const HeldElements&) = delete;
  ~HeldElements() {
    for (Feed* feed : feeds_) feed->end_run();
  }

 private:
  std::span<Feed* const> feeds_;
};

Stopped stopped(int64_t num_iterations, const Plan& plan) {
  return Stopped(join("run: stopped after ", num_iterations, " of ",
                      plan.loop().device_iterations, " device iterations"));
}

}  // namespace

StageRun::StageRun(const Plan& plan)
    : plan_(plan),
      memory_(plan),
      instructions_(plan.graph(), plan.arena(), memory_),
      context_(memory_),
      checkpoint_(plan) {
  context_.loop = plan.loop();
  build_blocks();
}

void StageRun::build_blocks() {
  const std::vector<Op>& ops = plan_.graph().ops();
  for (size_t i = 0; i < ops.size(); ++i) {
    if (ops[i].phase == Phase::kSetup) setup_.push_back(instructions_[i]);
  }
  const auto stages = static_cast<size_t>(plan_.graph().num_stages());
  forward_.resize(stages);
  backward_.resize(stages);
  for (const memory::Block& block : plan_.blocks()) {
    const auto stage = static_cast<size_t>(block.stage);
    Block& target = block.phase == Phase::kForward    ? forward_[stage]
                    : block.phase == Phase::kBackward ? backward_[stage]
                                                      : update_;
    target = make_block(block);
  }
}

StageRun::Block StageRun::make_block(const memory::Block& planned) const {
  Block block;
  for (const int64_t index : planned.ops) {
    block.instructions.push_back(instructions_[static_cast<size_t>(index)]);
  }
  const std::vector<TensorId>& inputs = plan_.inputs();
  for (size_t i = 0; i < inputs.size(); ++i) {
    const bool is_read =
        std::ranges::find(planned.tensors, inputs[i]) != planned.tensors.end();
    if (is_read) block.inputs.push_back(i);
  }
  block.stashes = memory_.stashes_among(planned.tensors);
  return block;
}

const StageRun::Block& StageRun::block(const Action& action) const {
  switch (action.kind) {
    case ActionKind::kForward:
      return forward_[static_cast<size_t>(action.stage)];
    case ActionKind::kBackward:
      return backward_[static_cast<size_t>(action.stage)];
    case ActionKind::kUpdate:
      return update_;
  }
  throw InternalError("stage_run: not an action");
}

void StageRun::load(std::span<Listener* const> listeners) {
  const PlainKernels plain;
  context_.listeners = listeners;
  instructions_.execute(setup_, context_);
}

void StageRun::run(const Call& call) {
  const PlainKernels plain;
  context_.sinks = call.sinks;
  context_.outlets = call.outlets;
  context_.patience = &call.stop;
  context_.seed = call.seed;
  context_.listeners = call.listeners;
  context_.host = call.host;
  context_.ends = &ended_;
  context_.iterations_before = num_iterations_;
  ended_ = false;
  feed_end_ = nullptr;
  last_micro_batch_.store(0, std::memory_order_relaxed);
  const HeldElements held(call);
  run_iterations(call);
}

void StageRun::run_iterations(const Call& call) {
  const int64_t times = plan_.training() ? plan_.loop().device_iterations : 1;
  for (int64_t i = 0; i < times && !ended_; ++i) {
    const int64_t first_step = step_;
    try {
      run_iteration(call, i);
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

void StageRun::run_iteration(const Call& call, int64_t iteration) {
  const int64_t first_step = step_;
  num_finished_ = 0;
  if (plan_.training()) checkpoint_.begin(memory_);
  // Long ops may stop only if the device iteration can be discarded.
  context_.stop =
      plan_.training() && !checkpoint_.complete() ? nullptr : &call.stop;
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

bool StageRun::end_before(const Action& action, int64_t iteration,
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

bool StageRun::give_up(int64_t first_step) {
  if (!plan_.training() || !checkpoint_.complete()) return false;
  checkpoint_.restore(memory_);
  step_ = first_step;
  return true;
}

void StageRun::run_action(const Call& call, const Action& action,
                          int64_t iteration, int64_t first_step) {
  const int64_t accumulation = plan_.loop().gradient_accumulation;
  last_micro_batch_.store(
      iteration * accumulation + (action.kind == ActionKind::kUpdate
                                      ? accumulation - 1
                                      : action.micro_batch),
      std::memory_order_relaxed);
  try {
    if (action.kind == ActionKind::kUpdate) {
      context_.cursor = {iteration, accumulation - 1, step_ - 1};
      // The update may read the inputs and the values of the last micro-batch.
      execute(call, block(action), accumulation - 1,
              (iteration + 1) * accumulation - 1);
      for (Feed* feed : call.feeds) {
        feed->release_before((iteration + 1) * accumulation);
      }
      return;
    }
    const int64_t mb = action.micro_batch;
    const int64_t index = iteration * accumulation + mb;
    context_.cursor = {plan_.training() ? iteration : mb,
                       plan_.training() ? mb : 0, first_step + mb};
    if (step_ <= first_step + mb) {
      if (!take_elements(call, index, step_ - first_step)) return;
      step_ = first_step + mb + 1;
      num_begun_.store(num_begun_ + 1, std::memory_order_relaxed);
    }
    execute(call, block(action), mb, index);
    release_inputs(call, action, index);
  } catch (const Stopped&) {
    give_up(first_step);
    throw stopped(plan_.training() ? iteration : num_finished_, plan_);
  }
  if (action.stage + 1 == plan_.graph().num_stages()) {
    num_finished_ = action.micro_batch + 1;
  }
}

void StageRun::release_inputs(const Call& call, const Action& action,
                              int64_t micro_batch) {
  const int64_t accumulation = plan_.loop().gradient_accumulation;
  const bool is_last =
      plan_.training()
          ? action.kind == ActionKind::kBackward && action.stage == 0
          : action.stage + 1 == plan_.graph().num_stages();
  // The update may read the inputs of the last micro-batch.
  const bool waits = plan_.training() && action.micro_batch + 1 == accumulation;
  if (!is_last || waits) return;
  for (Feed* feed : call.feeds) feed->release_before(micro_batch + 1);
}

void StageRun::execute(const Call& call, const Block& block,
                       int64_t micro_batch, int64_t index) {
  for (const size_t input : block.inputs) {
    memory_.bind(plan_.inputs()[input],
                 call.sources[input]->micro_batch(index));
  }
  memory_.select_slots(block.stashes, micro_batch);
  instructions_.execute(block.instructions, context_);
}

bool StageRun::take_elements(const Call& call, int64_t micro_batch,
                             int64_t num_begun) {
  const bool some_in_flight = !plan_.training() && num_finished_ < num_begun;
  try {
    for (Feed* feed : call.feeds) std::ignore = feed->element(micro_batch);
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
