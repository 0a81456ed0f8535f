// A body of an op, ready to run.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/run_context.h"

namespace popsim::ops {

// The runtime makes them, before it prepares the op that they belong to.
class BodyRunner {
 public:
  BodyRunner() = default;
  BodyRunner(const BodyRunner&) = delete;
  BodyRunner& operator=(const BodyRunner&) = delete;
  virtual ~BodyRunner() = default;

  // Where an input lies, contiguous, and where a result is to be written: until
  // they are bound to another place.
  virtual void bind_input(size_t i, void* address) = 0;
  virtual void bind_result(size_t i, void* address) = 0;
  // Runs the ops once. `step` stands in the place of the outer cursor's: random
  // numbers are keyed by it.
  virtual void run(const RunContext& outer, int64_t step) = 0;
};

}  // namespace popsim::ops
