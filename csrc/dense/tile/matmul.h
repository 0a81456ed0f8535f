// Matrix products by the matrix units of the processor (units.h): of float32,
// float16 and bfloat16 numbers, which are all divided into bfloat16 parts
// (parts.h), with float32 sums.
#pragma once

#include <memory>

#include "dense/problem/matmul.h"

namespace popsim::dense {

// Returns null if the processor has neither such units nor instructions that do
// the same, or if another implementation is at least as fast.
[[nodiscard]] std::unique_ptr<Matmul> create_tile_matmul(
    const MatmulSpec& spec);

}  // namespace popsim::dense
