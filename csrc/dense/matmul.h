// Which code computes a product.
#pragma once

#include <memory>

#include "dense/problem/matmul.h"

namespace popsim::dense {

// Null when there is no code for the problem: for empty matrices, alpha 0,
// and, except for short products, matrices without an axis of stride 1.
[[nodiscard]] std::unique_ptr<Matmul> create_matmul(const MatmulSpec& spec);

// Whether the product itself does what `spec` says of relu, mask and update.
[[nodiscard]] bool can_fuse(const MatmulSpec& spec);

}  // namespace popsim::dense
