// A body of an op, ready to run.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/run_context.h"

namespace popsim::ops {

// The runtime makes them before it prepares the op that owns the bodies.
class BodyRunner {
 public:
  BodyRunner() = default;
  BodyRunner(const BodyRunner&) = delete;
  BodyRunner& operator=(const BodyRunner&) = delete;
  virtual ~BodyRunner() = default;

  // Sets the address of an input, which must be contiguous, or of a result. The
  // address stays until the next call.
  virtual void bind_input(size_t i, void* address) = 0;
  virtual void bind_result(size_t i, void* address) = 0;
  // Runs the ops once. `step` replaces the step of the outer cursor: it is part
  // of the key of random numbers.
  virtual void run(const RunContext& outer, int64_t step) = 0;
};

}  // namespace popsim::ops
