// The attribute of products and convolutions that chooses their partial sums.
#pragma once

#include "ops/op_def.h"

namespace popsim::ops {

// True for partials="half": then sums of products are float16
// (dense/vector/panels.h). Without the attribute they are float32. Throws
// InternalError for another value, and if the operands are not float16.
[[nodiscard]] bool has_half_partials(const OpCall& op);

}  // namespace popsim::ops
