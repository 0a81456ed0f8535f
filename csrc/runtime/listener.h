// Who is told what a run does.
#pragma once

#include "graph/graph.h"
#include "ops/run_context.h"

namespace popsim::runtime {

// Looks on, and changes no value.
class Listener {
 public:
  virtual ~Listener() = default;
  // An action begins: its ops follow one another.
  virtual void before_action() {}
  // The op has just run; its results are in memory.
  virtual void after(const graph::Op& op, const ops::RunContext& context) = 0;
};

}  // namespace popsim::runtime
