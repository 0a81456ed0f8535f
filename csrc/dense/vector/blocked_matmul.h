// Matrix products of any size, in blocks that stay in the caches. What does not
// lie as the vectors read it is copied, a block at a time.
//
// A number of the result is the sum, in the order of the depth, of sums of up
// to 256 products: the same whatever the number of threads, and whatever rows
// and columns are computed beside it.
#pragma once

#include <memory>

#include "dense/problem/matmul.h"

namespace popsim::dense {

// Null for operands without an axis of stride 1.
[[nodiscard]] std::unique_ptr<Matmul> create_blocked_matmul(
    const MatmulSpec& spec);

}  // namespace popsim::dense
