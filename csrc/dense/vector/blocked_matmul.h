// Matrix products of any size, in blocks that stay in the caches. Operands that
// do not have the order that the vectors need are copied, one block at a time.
//
// Each number of the result is the sum, in the order of the depth, of sums of
// up to 256 products. It is the same for any number of threads, and whatever
// other rows and columns are computed.
#pragma once

#include <memory>

#include "dense/problem/matmul.h"

namespace popsim::dense {

// Returns null for operands without an axis of stride 1.
[[nodiscard]] std::unique_ptr<Matmul> create_blocked_matmul(
    const MatmulSpec& spec);

}  // namespace popsim::dense
