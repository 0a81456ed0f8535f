// Computes a block of a product from the numbers themselves, for numbers whose
// parts do not give the right product (parts.h): very large ones, infinities
// and NaN.
#pragma once

#include <cstdint>

#include "dense/tile/parts.h"

namespace popsim::dense {

struct PlainBlock {
  PartSource a;
  PartSource b;
  int64_t row;     // the first row of a
  int64_t column;  // the first row of b
  int64_t first_depth;
  int64_t last_depth;
};

// The computation is float32. It writes all kBlock rows and columns of `sums`,
// with zeros beyond those of the operands. `stride`: distance between rows.
void multiply_plain_block(const PlainBlock& block, float* sums, int64_t stride);

}  // namespace popsim::dense
