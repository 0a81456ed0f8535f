// Products of float16 and bfloat16 matrices by the bfloat16 units of the
// processor, with partial sums in float32 (split.h).
#pragma once

#include <memory>

#include "dense/matmul.h"

namespace popsim::dense {

// Null where the processor has no such units or the product is too small for
// them to pay. `exact`: computes the product when a number cannot be split.
[[nodiscard]] std::unique_ptr<Matmul> create_split_matmul(
    const MatmulSpec& spec, std::unique_ptr<Matmul>& exact);

}  // namespace popsim::dense
