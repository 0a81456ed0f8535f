// What the ops that copy tensors to the host bring back from a run.
#pragma once

#include "ops/op_def.h"
#include "ops/run_context.h"

namespace popsim::ops {

// What one of them fills.
struct Filled {
  int64_t buffer;  // position of the return
  DType dtype;
  int64_t numel;  // of all entries together
};

// What an "anchor" op fills, in a program that passed verify().
[[nodiscard]] Filled filled_by(const OpView& op, LoopCounts loop);

}  // namespace popsim::ops
