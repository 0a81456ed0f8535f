// Numbers as sums of bfloat16 numbers, in the order of the matrix units.
//
// A bfloat16 has 8 significant bits: three hold a float32 exactly, two a
// float16. A product of matrices is then a sum of products of parts, which the
// units compute much faster than one of float32 (units.h):
//   float32   a1b1 + a1b2 + a2b1 + a2b2 + a1b3 + a3b1, without what is below
//             2^-25 of a product
//   float16   a1b1 + a1b2 + a2b1, without what is below 2^-18
//   bfloat16  a1b1
//
// The units take numbers below 2^-126 for zero, among their operands and
// wherever they round a sum. So float32 and bfloat16 numbers are packed 2^24
// times as large, and sums are multiplied with 2^-48 when they are read, which
// changes no other bit. Then nothing of an operand is lost: all numbers of the
// types are multiples of 2^-149 and their parts, packed, of 2^-125, which are
// zero or seen by the units. And a sum that is taken for zero is below 2^-126
// as the units see it, below 2^-174 in the result: each of their roundings
// loses less than 2^-24 of what each of float32's may, 2^-150. So with S, the
// sum of the magnitudes of the products, the error of a sum of n of them is at
// most
//   n 2^-24 S   for float32's roundings and the products left out
//   + 2^-150    for rounding to a denormal float32, once where it is read
//   + n 2^-169  for what was taken for zero in at most 2^5 roundings each
// whatever the magnitudes of the operands are. float16 numbers, multiples of
// 2^-24, stay as they are: their parts and sums are never small.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>

#include "base/dtype.h"
#include "dense/tile/units.h"

namespace popsim::dense {

// Parts of numbers with this many significant bits.
[[nodiscard]] constexpr int num_parts_of(int significant_bits) {
  return significant_bits <= 8 ? 1 : significant_bits <= 11 ? 2 : 3;
}

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

// How many times as large numbers are packed, and what products of packed
// numbers are multiplied with when they are read.
[[nodiscard]] constexpr float packed_scale(int num_parts) {
  return num_parts == 2 ? 1.0F : 0x1p24F;
}
[[nodiscard]] constexpr float sum_scale(int num_parts) {
  return 1.0F / packed_scale(num_parts) / packed_scale(num_parts);
}

// Whether the parts of two operands give sums of their products, from the sums
// of their squares: then no sum overflows (its square is at most the product of
// the operands' squares, which leaves room for the scale and for what rounding
// to parts adds), and no number is infinite or NaN. Otherwise products of the
// following parts may not be small: infinities and NaN meet zeros there, and
// sums beyond float32 become infinite, with either sign. `num_sums`: how
// many such sums are added up.
[[nodiscard]] constexpr bool are_ordinary(float a, float b, int64_t num_sums) {
  constexpr double kLargest = 0x1p76;  // and 2^48 times that: 2^124
  const auto count = static_cast<double>(num_sums);
  return count * count * a * b < kLargest * kLargest;
}

// The largest of what several threads found; NaN where one found that.
class Largest {
 public:
  void add(float value) {
    float before = value_;
    while (!(value <= before) && !std::isnan(before) &&
           !value_.compare_exchange_weak(before, value)) {
    }
  }
  [[nodiscard]] float value() const { return value_; }

 private:
  std::atomic<float> value_ = 0.0F;
};

// Returns the sum of the numbers' squares, a little rounded, and some 2^-55.
using PackFunction = float (*)(const PartSource& source,
                               const PartBlock& block);
[[nodiscard]] PackFunction pack_function(DType dtype, int num_parts,
                                         TileOrder order);

// A row of positions with up to kTileRows numbers each.
struct PositionRow {
  const float* data;
  int64_t offset;  // of position 0, which need not exist
  int64_t stride;  // from position to position
  int64_t first;   // to `last`: the positions that exist; the others are zeros
  int64_t last;
  int64_t lanes;  // numbers at a position; those up to kTileRows are zeros
};

// Packs `count` positions, each as a row of a tile: number i of `low` and
// number i of `high` side by side. Writes them to `out`, the following parts
// `part` numbers further each. Returns the sum of squares as above.
using PackRowFunction = float (*)(const PositionRow& low,
                                  const PositionRow& high, int64_t count,
                                  uint16_t* out, int64_t part);
[[nodiscard]] PackRowFunction pack_row_function(int num_parts);

// Turns a tile around: pairs of numbers change places. `to` may not be `from`.
void transpose_tile(const uint16_t* from, uint16_t* to);

}  // namespace popsim::dense
