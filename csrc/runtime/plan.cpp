#include "runtime/plan.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "base/check.h"
#include "ops/check.h"
#include "ops/schema.h"
#include "ops/work.h"
#include "runtime/closed_memory.h"
#include "threads/budget.h"

namespace popsim::runtime {
namespace {

bool changes_weights_in_backward(const graph::Graph& graph) {
  return std::ranges::any_of(graph.ops(), [](const graph::Op& op) {
    if (op.phase != graph::Phase::kBackward) return false;
    const ops::Operand* weight = ops::find_schema(op.kind).input("weight");
    return weight != nullptr && weight->written;
  });
}

bool has_number_checks(const graph::Graph& graph) {
  return std::ranges::any_of(
      graph.ops(), [](const graph::Op& op) { return op.kind == "finite"; });
}

// Whether there are ops that only the thread of the caller may run, in the
// order of the whole schedule.
bool has_ops_in_order(const graph::Graph& graph) {
  return std::ranges::any_of(graph.ops(), [&graph](const graph::Op& op) {
    // The update runs on the thread of the caller anyway.
    if (op.phase == graph::Phase::kUpdate) return false;
    const ops::OpDef& entry = ops::find_op(op.kind);
    const bool ends_when_told =
        op.kind == "loop" &&
        ops::OpCall(graph, op).attribute<bool>("conditional");
    return entry.in_order || entry.calls_host || ends_when_told ||
           std::ranges::any_of(op.bodies, [](const auto& body) {
             return has_ops_in_order(*body);
           });
  });
}

bool sees_inputs(const graph::Op& op) {
  return ops::find_schema(op.kind).sees_inputs();
}

// Adds the queues that an op enqueues to.
void add_queues(const graph::Graph& graph, const graph::Op& op,
                std::set<int64_t>& queues) {
  if (op.kind == "enqueue") {
    queues.insert(ops::OpCall(graph, op).attribute<int64_t>("queue"));
  }
  for (const auto& body : op.bodies) {
    for (const graph::Op& inner : body->ops()) {
      add_queues(*body, inner, queues);
    }
  }
}

// Whether two lanes enqueue to one queue, whose order is that of the schedule.
bool share_a_queue(const graph::Graph& graph,
                   const memory::LaneOfStage& lane_of_stage) {
  std::map<int64_t, int32_t> lanes;
  for (const graph::Op& op : graph.ops()) {
    if (op.phase != graph::Phase::kForward &&
        op.phase != graph::Phase::kBackward) {
      continue;
    }
    std::set<int64_t> queues;
    add_queues(graph, op, queues);
    const int32_t lane = lane_of_stage[static_cast<size_t>(op.stage)];
    for (const int64_t queue : queues) {
      if (lanes.emplace(queue, lane).first->second != lane) return true;
    }
  }
  return false;
}

}  // namespace

Plan::Plan(graph::Graph graph, RunConfig config, const memory::Beside& beside)
    : graph_(std::move(graph)),
      config_(std::move(config)),
      checks_numbers_(has_number_checks(graph_)) {
  check_internal(config_.training || config_.gradient_accumulation == 1,
                 "plan: inference accumulates no gradients");
  check_internal(
      config_.process >= 0 && config_.process < config_.num_processes,
      "plan: process ", config_.process, " of ", config_.num_processes);
  // This check comes first: it makes sure that the number of stages is valid.
  graph::verify(graph_);
  const schedule::Config schedule{graph_.num_stages(),
                                  config_.training
                                      ? config_.gradient_accumulation
                                      : config_.device_iterations,
                                  config_.training, config_.positions};
  schedule_ = schedule::generate(config_.schedule, schedule);
  schedule::validate(schedule_, schedule);
  ops::check_ops(graph_, /*types=*/true);
  ops::check_order(graph_, schedule::max_in_flight(schedule_) > 1);
  updates_in_iteration_ = changes_weights_in_backward(graph_);
  blocks_ = memory::make_blocks(graph_);
  check_replicas(graph_, config_.replicas);
  instances_ = find_instances(graph_, config_.replicas);
  updaters_ =
      find_updaters(graph_, blocks_.back(), config_.replicas, instances_);
  // Replicas need no data of each other, so they come before stages.
  if (may_form_teams()) {
    num_teams_ = std::min(config_.replicas.count, most_threads());
  }
  lane_of_stage_ = divide_stages(most_threads() / num_teams_);
  live_ranges_ =
      memory::live_ranges(graph_, blocks_, schedule_, lane_of_stage_);
  waits_ = memory::find_waits(graph_, blocks_, live_ranges_, lane_of_stage_,
                              config_.positions, sees_inputs);
  last_blocks_ =
      memory::find_last(blocks_, config_.positions, config_.training);
  if (!config_.training && num_lanes() > 1) {
    // Feeds hold no more elements than there are micro-batches in flight.
    const size_t last = static_cast<size_t>(graph_.num_stages()) - 1;
    waits_[0].push_back({last, schedule::max_in_flight(schedule_)});
  }
  arena_ = memory::plan_arena(
      graph_, blocks_, live_ranges_, lane_of_stage_,
      [](const graph::Op& op) { return ops::find_op(op.kind).reuses_input; });
  persistent_ = memory::plan_persistent(graph_, instances_, beside);
  for (size_t i = 0; i < graph_.tensors().size(); ++i) {
    if (graph_.tensors()[i].kind == graph::TensorKind::kInput) {
      inputs_.push_back(static_cast<graph::TensorId>(i));
    }
  }
}

ops::Cursor Plan::cursor(int64_t iteration, int64_t micro_batch,
                         int64_t first_key, int64_t replica) const {
  return {.device_iteration = config_.training ? iteration : micro_batch,
          .accumulation_step = config_.training ? micro_batch : 0,
          .step = first_key + micro_batch * num_copies() + replica,
          .replica = replica};
}

std::set<int64_t> Plan::queues() const {
  std::set<int64_t> queues;
  for (const graph::Op& op : graph_.ops()) add_queues(graph_, op, queues);
  return queues;
}

int64_t Plan::max_held() const {
  return keeps_elements() ? config_.gradient_accumulation
                          : schedule::max_in_flight(schedule_);
}

int32_t Plan::most_threads() const {
  const auto most = static_cast<int32_t>(threads::most());
  return config_.stage_threads > 0 ? std::min(config_.stage_threads, most)
                                   : most;
}

bool Plan::may_form_teams() const {
  return config_.replicas.count > 1 && !config_.floating_point_checks &&
         !updates_in_iteration_ && !kMemoryCloses &&
         !has_ops_in_order(graph_) && queues().empty();
}

memory::LaneOfStage Plan::divide_stages(int32_t most) const {
  const auto num_stages = static_cast<size_t>(graph_.num_stages());
  memory::LaneOfStage together(num_stages, 0);
  const bool alone = schedule::max_in_flight(schedule_) == 1 ||
                     config_.floating_point_checks || updates_in_iteration_ ||
                     kMemoryCloses || has_ops_in_order(graph_);
  if (alone) return together;
  std::vector<double> work(num_stages);
  for (const graph::Op& op : graph_.ops()) {
    if (op.phase != graph::Phase::kForward &&
        op.phase != graph::Phase::kBackward) {
      continue;
    }
    for (const graph::Work& part : ops::work_of(ops::OpView(graph_, op))) {
      work[static_cast<size_t>(op.stage)] +=
          graph::flops(part) + static_cast<double>(graph::bytes(part));
    }
  }
  const memory::LaneOfStage apart = memory::divide(work, most);
  const bool may = memory::can_share(graph_, blocks_, apart, sees_inputs) &&
                   !share_a_queue(graph_, apart);
  return may ? apart : together;
}

}  // namespace popsim::runtime
