#include "runtime/plan.h"

#include <utility>

#include "base/check.h"
#include "ops/check.h"

namespace popsim::runtime {
Plan::Plan(graph::Graph graph, RunConfig config)
    : graph_(std::move(graph)), config_(std::move(config)) {
  check_internal(config_.training || config_.gradient_accumulation == 1,
                 "plan: inference accumulates no gradients");
  ops::verify(graph_, /*in_flight=*/config_.schedule != "sequential");
  const schedule::Config schedule{graph_.num_stages(),
                                  config_.training
                                      ? config_.gradient_accumulation
                                      : config_.device_iterations,
                                  config_.training};
  schedule_ = schedule::generate(config_.schedule, schedule);
  schedule::validate(schedule_, schedule);
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
