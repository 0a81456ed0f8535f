// The work of ops: helpers for the entries, and the work of a whole op.
#pragma once

#include <vector>

#include "graph/work.h"
#include "ops/op_def.h"

namespace popsim::ops {

// The work according to the entry. If the entry gives no bytes, the op moves
// each of its inputs and outputs once.
[[nodiscard]] std::vector<graph::Work> work_of(const OpView& op);

// For entries whose ops compute nothing.
[[nodiscard]] std::vector<graph::Work> no_arithmetic(const OpView& op);
// For entries whose ops compute every element of their first output (or, if no
// op reads it, of their first input) from a few other elements.
template <int64_t kCost>
[[nodiscard]] std::vector<graph::Work> elementwise(const OpView& op) {
  const graph::Tensor& tensor = op.has_output(0) ? op.output(0) : op.input(0);
  return {graph::Elementwise{tensor.numel(), kCost}};
}

}  // namespace popsim::ops
