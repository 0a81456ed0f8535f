#include "runtime/plan.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "ops/check.h"
#include "ops/schema.h"

namespace popsim::runtime {
namespace {

bool changes_weights_in_backward(const graph::Graph& graph) {
  return std::ranges::any_of(graph.ops(), [](const graph::Op& op) {
    if (op.phase != graph::Phase::kBackward) return false;
    const ops::Operand* weight = ops::find_schema(op.kind).input("weight");
    return weight != nullptr && weight->written;
  });
}

}  // namespace

Plan::Plan(graph::Graph graph, RunConfig config)
    : graph_(std::move(graph)), config_(std::move(config)) {
  check_internal(config_.training || config_.gradient_accumulation == 1,
                 "plan: inference accumulates no gradients");
  // This check comes first: it makes sure that the number of stages is valid.
  graph::verify(graph_);
  const schedule::Config schedule{graph_.num_stages(),
                                  config_.training
                                      ? config_.gradient_accumulation
                                      : config_.device_iterations,
                                  config_.training};
  schedule_ = schedule::generate(config_.schedule, schedule);
  schedule::validate(schedule_, schedule);
  ops::check_ops(graph_, /*types=*/true);
  ops::check_order(graph_, schedule::max_in_flight(schedule_) > 1);
  updates_in_iteration_ = changes_weights_in_backward(graph_);
  blocks_ = memory::make_blocks(graph_);
  live_ranges_ = memory::live_ranges(graph_, blocks_, schedule_);
  arena_ = memory::plan_arena(
      graph_, blocks_, live_ranges_,
      [](const graph::Op& op) { return ops::find_op(op.kind).reuses_input; });
  persistent_ = memory::plan_persistent(graph_);
  for (size_t i = 0; i < graph_.tensors().size(); ++i) {
    if (graph_.tensors()[i].kind == graph::TensorKind::kInput) {
      inputs_.push_back(static_cast<graph::TensorId>(i));
    }
  }
}

}  // namespace popsim::runtime
