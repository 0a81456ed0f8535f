#include "runtime/lane.h"

#include <algorithm>

#include "base/check.h"

namespace popsim::runtime {
namespace {

using graph::Op;
using graph::Phase;
using graph::TensorId;
using schedule::Action;
using schedule::ActionKind;

// By position, which ops a lane of a replica runs.
std::vector<bool> ops_of(const Plan& plan, int32_t replica, int32_t lane) {
  std::vector<bool> own;
  for (const Op& op : plan.graph().ops()) {
    const bool in_stage =
        op.phase == Phase::kForward || op.phase == Phase::kBackward;
    const int32_t owner =
        in_stage ? plan.lane_of_stage()[static_cast<size_t>(op.stage)] : 0;
    own.push_back(owner == lane && (op.phase != Phase::kSetup || replica == 0));
  }
  const std::vector<int64_t>& update = plan.blocks().back().ops;
  for (size_t i = 0; i < update.size(); ++i) {
    const bool runs =
        plan.updaters()[i][static_cast<size_t>(replica)] == replica;
    if (!runs) own[static_cast<size_t>(update[i])] = false;
  }
  return own;
}

}  // namespace

Lane::Lane(const Plan& plan, const DeviceStorage& storage, int32_t replica,
           int32_t number)
    : plan_(plan),
      replica_(replica),
      memory_(plan, storage, replica),
      instructions_(plan.graph(), plan.arena(), memory_,
                    ops_of(plan, replica, number)),
      context_(memory_) {
  context_.loop = plan.loop();
  const std::vector<Op>& ops = plan_.graph().ops();
  for (size_t i = 0; i < ops.size(); ++i) {
    if (ops[i].phase == Phase::kSetup && number == 0 && replica == 0) {
      setup_.push_back(instructions_[i]);
    }
  }
  const auto stages = static_cast<size_t>(plan_.graph().num_stages());
  forward_.resize(stages);
  backward_.resize(stages);
  for (const memory::Block& block : plan_.blocks()) {
    const auto stage = static_cast<size_t>(block.stage);
    if (block.phase == Phase::kUpdate) {
      if (number == 0) update_ = make_block(block);
    } else if (plan_.lane_of_stage()[stage] == number) {
      std::vector<Block>& blocks =
          block.phase == Phase::kForward ? forward_ : backward_;
      blocks[stage] = make_block(block);
    }
  }
}

Lane::Block Lane::make_block(const memory::Block& planned) const {
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

const Lane::Block& Lane::block(const Action& action) const {
  switch (action.kind) {
    case ActionKind::kForward:
      return forward_[static_cast<size_t>(action.stage)];
    case ActionKind::kBackward:
      return backward_[static_cast<size_t>(action.stage)];
    case ActionKind::kUpdate:
      return update_;
  }
  throw InternalError("lane: not an action");
}

void Lane::load(std::span<Listener* const> listeners) {
  context_.listeners = listeners;
  instructions_.execute(setup_, context_);
}

void Lane::share_update(const Lanes& lanes) {
  const std::vector<int64_t>& update = plan_.blocks().back().ops;
  for (size_t i = 0; i < update.size(); ++i) {
    const int32_t runs = plan_.updaters()[i][static_cast<size_t>(replica_)];
    if (runs == replica_) continue;
    const Op& op = plan_.graph().ops()[static_cast<size_t>(update[i])];
    for (const TensorId id : op.outputs) {
      if (id == graph::kNoTensor) continue;
      const TensorId root = plan_.graph().root(id);
      if (plan_.graph().tensor(root).kind != graph::TensorKind::kValue)
        continue;
      memory_.bind(root,
                   lanes[static_cast<size_t>(runs)][0]->memory_.pointer(root));
    }
  }
}

void Lane::begin_run(const Call& call, int64_t iterations_before, bool* ended,
                     ops::NumberChecks* checks) {
  const size_t num_outlets =
      call.outlets.size() / static_cast<size_t>(plan_.replicas().count);
  context_.sinks = call.sinks;
  context_.outlets = call.outlets.subspan(
      static_cast<size_t>(replica_) * num_outlets, num_outlets);
  context_.patience = &call.stop;
  context_.seed = call.seed;
  context_.listeners = call.listeners;
  context_.host = call.host;
  context_.exchange = call.exchange;
  context_.ends = ended;
  context_.checks = checks;
  context_.iterations_before = iterations_before;
}

void Lane::run(const Call& call, const Action& action,
               const ops::Cursor& cursor, int64_t index) {
  const auto began = Timeline::now(call.timeline);
  begin(call, action, cursor, index);
  instructions_.execute(block(action).instructions, context_);
  if (call.timeline) call.timeline->note(action, replica_, index, began);
}

void Lane::begin(const Call& call, const Action& action,
                 const ops::Cursor& cursor, int64_t index) {
  const Block& own = block(action);
  context_.cursor = cursor;
  for (const size_t input : own.inputs) {
    memory_.bind(plan_.inputs()[input],
                 call.sources[input]->micro_batch(
                     index, plan_.replicas().input_of(replica_)));
  }
  const int64_t micro_batch =
      plan_.training() ? cursor.accumulation_step : cursor.device_iteration;
  memory_.select_slots(own.stashes, micro_batch);
}

void Lane::run_update(size_t op) {
  instructions_.execute(std::span(&update_.instructions[op], 1), context_);
}

}  // namespace popsim::runtime
