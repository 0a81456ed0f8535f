// Matrix products with one short axis, as in models with small batches.
//
// Other products (blocked_matmul.h) copy blocks of operands that are stored by
// columns. With few rows that costs as much as the product. These codelets read
// the large operand once, in place, and copy at most the small one.
#pragma once

#include <memory>

#include "dense/problem/matmul.h"

namespace popsim::dense {

// Returns null if another implementation is at least as fast.
[[nodiscard]] std::unique_ptr<Matmul> create_short_matmul(
    const MatmulSpec& spec);

}  // namespace popsim::dense
