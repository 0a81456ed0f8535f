// What the ops that copy tensors to the host bring back from a run.
#pragma once

#include "ops/op_def.h"
#include "ops/run_context.h"

namespace popsim::ops {

// A tensor that comes back from a run: a model output or an anchor. Its entries
// lie one after the other, each contiguous.
struct Return {
  graph::TensorId source;  // what each entry is a copy of
  int64_t num_entries;
  Shape shape;  // of all entries together, what users get
  DType dtype;
  // Anchors stay in a buffer of the device; outputs are new memory each run.
  bool keep;
};

// What an "anchor" op brings back, in a program that passed verify().
[[nodiscard]] Return return_of(const OpView& op, LoopCounts loop);

// The shape that users get: entries follow each other along the first axis. One
// entry of a scalar is a scalar.
[[nodiscard]] Shape shape_of_entries(const Shape& entry, int64_t num_entries);

}  // namespace popsim::ops
