// Numbers as sums of bfloat16 numbers, in the order of the matrix units.
//
// A bfloat16 has 8 significant bits: three hold a float32 exactly, two a
// float16. A product of matrices is then a sum of products of parts, which the
// units compute much faster than one of float32 (tile_units.h):
//   float32   a1b1 + a1b2 + a2b1 + a2b2 + a1b3 + a3b1, without what is below
//             2^-25 of a product
//   float16   a1b1 + a1b2 + a2b1, without what is below 2^-18
//   bfloat16  a1b1
// The units take numbers below 2^-126 for zero: a float32 below 2^-102 loses
// bits of its last part.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "dense/tile_units.h"

namespace popsim::dense {

// A matrix with one axis, the depth, along which a product adds up. One of the
// strides is 1. Strides are in elements.
struct PartSource {
  const void* data;
  DType dtype;  // float32, float16 or bfloat16
  int64_t rows;
  int64_t depth;
  int64_t row_stride;
  int64_t depth_stride;
};

// What a tile of the units holds: kTileRows rows, each with kStepDepth numbers
// along the depth, or, for the right operand, rows of pairs along the depth,
// one pair for each of kTileRows columns. The depth is in the same order in
// both.
enum class TileOrder : int8_t { kRows, kPairs };

struct PartBlock {
  int64_t first_row;  // of at most kBlock
  int64_t first_depth;
  int64_t num_steps;  // of kStepDepth; beyond the source are zeros
  uint16_t* out;      // [num_steps][num_parts][2 tiles]
};

// From here on float32 numbers, seen as bits without the sign, round to an
// infinite bfloat16, or are infinite or NaN themselves.
inline constexpr uint32_t kTooLarge = 0x7f7f8000;

// Returns the largest magnitude of the numbers as the bits of a float32; 0 for
// a single part, where nobody needs it. `bounded`: rounds finite numbers to
// finite ones, which takes longer.
using PackFunction = uint32_t (*)(const PartSource& source,
                                  const PartBlock& block);
[[nodiscard]] PackFunction pack_function(DType dtype, int num_parts,
                                         TileOrder order, bool bounded);

}  // namespace popsim::dense
