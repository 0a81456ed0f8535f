// The attribute of products, convolutions and recurrent layers that lets them
// compute with fewer bits of float32 operands.
#pragma once

#include "ops/op_def.h"

namespace popsim::ops {

// The number of significant bits that an op must use of operands of this dtype:
// 8 of float32 with precision="bf16", 16 with precision="tf32" (two bfloat16
// numbers, more than the 11 bits of TensorFloat-32), all bits otherwise.
[[nodiscard]] int significant_bits_in(const OpCall& op, DType dtype);

// Throws InternalError if an op has the attribute but no float32 operand.
void check_precision(const OpCall& op);

}  // namespace popsim::ops
