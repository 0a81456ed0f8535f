// Objects that are notified during a run.
#pragma once

#include "graph/graph.h"
#include "ops/run_context.h"

namespace popsim::runtime {

// Observes a run and changes no value. An exception that it throws ends the
// run, as a failing op does.
class Listener {
 public:
  virtual ~Listener() = default;
  // An action begins, whose ops run one after the other.
  virtual void before_action() {}
  // The op is about to run; its operands are in memory.
  virtual void before(const graph::Op& /*op*/,
                      const ops::RunContext& /*context*/) {}
  // The op has just run; its results are in memory.
  virtual void after(const graph::Op& op, const ops::RunContext& context) = 0;
  // The listener of the ops of a body; null if only the op that the body
  // belongs to counts.
  [[nodiscard]] virtual Listener* of_body(const graph::Graph& /*body*/) {
    return nullptr;
  }
};

}  // namespace popsim::runtime
