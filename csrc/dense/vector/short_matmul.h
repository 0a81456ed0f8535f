// Matrix products with one short axis, as small batches give them.
//
// Other products (blocked_matmul.h) copy blocks of operands that lie by
// columns. With few rows that costs as much as the product. These codelets read
// the large operand where it is, once, and copy at most the small one.
#pragma once

#include <memory>

#include "dense/problem/matmul.h"

namespace popsim::dense {

// Null where another implementation is at least as fast.
[[nodiscard]] std::unique_ptr<Matmul> create_short_matmul(
    const MatmulSpec& spec);

}  // namespace popsim::dense
