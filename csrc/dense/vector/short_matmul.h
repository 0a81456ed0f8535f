// Matrix products with one short axis, as small batches give them.
//
// oneDNN's products copy an operand into blocks first. With few rows that copy
// costs as much as the product. These codelets read the large operand where it
// is, once, and copy at most the small one.
#pragma once

#include <memory>

#include "dense/matmul.h"

namespace popsim::dense {

// Null where another implementation is at least as fast.
[[nodiscard]] std::unique_ptr<Matmul> create_short_matmul(
    const MatmulSpec& spec);

}  // namespace popsim::dense
