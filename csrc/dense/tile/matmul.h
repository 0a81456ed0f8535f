// Matrix products by the matrix units of the processor (units.h): of
// float32, float16 and bfloat16 numbers, all in parts of bfloat16
// (parts.h), with sums in float32.
#pragma once

#include <memory>

#include "dense/problem/matmul.h"

namespace popsim::dense {

// Null where the processor has no such units or another implementation is at
// least as fast.
[[nodiscard]] std::unique_ptr<Matmul> create_tile_matmul(
    const MatmulSpec& spec);

}  // namespace popsim::dense
