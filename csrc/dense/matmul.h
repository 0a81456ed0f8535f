// Chooses the code that computes a product.
#pragma once

#include <memory>

#include "dense/problem/matmul.h"

namespace popsim::dense {

// Returns null if there is no code for the problem: for empty matrices, for
// alpha 0, and, except for short products, for matrices without an axis of
// stride 1.
[[nodiscard]] std::unique_ptr<Matmul> create_matmul(const MatmulSpec& spec);

// Whether the product itself can apply the relu, mask and update of `spec`.
[[nodiscard]] bool can_fuse(const MatmulSpec& spec);

}  // namespace popsim::dense
