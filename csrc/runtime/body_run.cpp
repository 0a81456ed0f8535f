#include "runtime/body_run.h"

namespace popsim::runtime {

BodyRun::BodyRun(const graph::Graph& body, const memory::ArenaPlan& plan,
                 char* arena)
    : graph_(body),
      inputs_(graph::inputs_of(body)),
      results_(graph::results_of(body)),
      memory_(body, plan, arena),
      instructions_(body, plan, memory_),
      context_(memory_) {
  // The last op, `yield`, has nothing to do.
  for (size_t i = 0; i + 1 < body.ops().size(); ++i) {
    all_.push_back(instructions_[i]);
  }
}

void BodyRun::choose_listeners(const Context& outer) {
  listeners_.clear();
  for (Listener* listener : outer.listeners) {
    Listener* own = listener->of_body(graph_);
    if (own != nullptr) listeners_.push_back(own);
  }
  context_.listeners = listeners_;
}

void BodyRun::run(const ops::RunContext& outer, int64_t step) {
  const auto& from = static_cast<const Context&>(outer);
  if (from.stop != nullptr && from.stop->up()) {
    throw Stopped("run: stopped inside a loop");
  }
  context_.stop = from.stop;
  context_.sinks = from.sinks;
  context_.seed = from.seed;
  context_.host = from.host;
  context_.outlets = from.outlets;
  context_.patience = from.patience;
  context_.loop = from.loop;
  context_.cursor = from.cursor;
  context_.cursor.step = step;
  if (!from.listeners.empty() || !listeners_.empty()) choose_listeners(from);
  instructions_.execute(all_, context_);
}

}  // namespace popsim::runtime
