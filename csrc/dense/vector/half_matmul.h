// Matrix products whose partial sums are float16 (panels.h).
#pragma once

#include <memory>

#include "dense/problem/matmul.h"

namespace popsim::dense {

// Returns null for operands without an axis of stride 1. The other operations
// of a product (alpha, beta, bias, relu, mask) follow the sum, in float32.
[[nodiscard]] std::unique_ptr<Matmul> create_half_matmul(
    const MatmulSpec& spec);

}  // namespace popsim::dense
