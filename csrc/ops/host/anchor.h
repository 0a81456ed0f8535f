// The returns of the ops that copy tensors to the host.
#pragma once

#include "ops/op_def.h"
#include "ops/run_context.h"

namespace popsim::ops {

// A tensor that a run returns: a model output or an anchor. Its entries follow
// one another, each contiguous.
struct Return {
  graph::TensorId source;  // each entry is a copy of it
  int64_t num_entries;
  Shape shape;  // of all entries together, as users get it
  DType dtype;
  // Anchors stay in a buffer on the device; outputs get new memory in each run.
  bool keep;
};

// The return of an "anchor" op, in a program that passed verify().
[[nodiscard]] Return return_of(const OpView& op, LoopCounts loop);

// The shape that users get: entries follow each other along the first axis. One
// entry of a scalar is a scalar.
[[nodiscard]] Shape shape_of_entries(const Shape& entry, int64_t num_entries);

}  // namespace popsim::ops
