// The rules for the bodies of loops and branches.
#pragma once

#include <vector>

#include "ops/op_def.h"

namespace popsim::ops {

// The inputs and results of a body.
struct BodyTypes {
  std::vector<TensorType> inputs;
  std::vector<TensorType> results;
};

// Throws InternalError if the number of the op's bodies is not `count`, or an
// input of the op is not contiguous.
[[nodiscard]] std::vector<BodyTypes> body_types(const OpCall& op, size_t count);

[[nodiscard]] inline bool is_same(const TensorType& a, const TensorType& b) {
  return a.dtype == b.dtype && a.shape == b.shape;
}

// The work of one run of a body, times the number of runs.
[[nodiscard]] std::vector<graph::Work> work_of_body(const graph::Graph& body,
                                                    int64_t times);

}  // namespace popsim::ops
