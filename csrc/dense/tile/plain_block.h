// A block of a product from the numbers themselves, for those whose parts do
// not give it (parts.h): very large ones, infinities and NaN.
#pragma once

#include <cstdint>

#include "dense/tile/parts.h"

namespace popsim::dense {

struct PlainBlock {
  PartSource a;
  PartSource b;
  int64_t row;     // the first one of a
  int64_t column;  // the first row of b
  int64_t first_depth;
  int64_t last_depth;
};

// Computes in float32. All kBlock rows and columns of `sums` are written, with
// zeros beyond those of the operands. `stride`: from row to row.
void multiply_plain_block(const PlainBlock& block, float* sums, int64_t stride);

}  // namespace popsim::dense
