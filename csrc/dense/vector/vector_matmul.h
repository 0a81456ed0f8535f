// Products of a matrix and a vector: of one row, or of one column.
#pragma once

#include <memory>

#include "dense/problem/matmul.h"

namespace popsim::dense {

// Returns null if neither operand is a vector, for a batch of vectors, and for
// matrices without an axis of stride 1.
[[nodiscard]] std::unique_ptr<Matmul> create_vector_matmul(
    const MatmulSpec& spec);

}  // namespace popsim::dense
