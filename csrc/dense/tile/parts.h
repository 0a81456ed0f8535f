// Represents numbers as sums of bfloat16 numbers, in the order that the matrix
// units need.
//
// A bfloat16 has 8 significant bits: three of them represent a float32 exactly,
// two a float16. A product that need not be as precise as float32 rounds its
// float32 operands to two parts or to one. A matrix product is then a sum of
// products of parts, which the units compute much faster than one product of
// float32 numbers (units.h):
//   float32   a1b1 + a1b2 + a2b1 + a2b2 + a1b3 + a3b1, without products
//             below 2^-25 of the whole product
//   16 bits   a1b1 + a1b2 + a2b1, without products below 2^-18; float16
//             needs no more
//   bfloat16  a1b1
//
// The units treat numbers below 2^-126 as zero, among their operands and
// wherever they round a sum. So float32 and bfloat16 numbers are multiplied by
// 2^24 when they are packed, and sums by 2^-48 when they are read, which
// changes no other bit. Then the operands lose nothing: all numbers of these
// dtypes are multiples of 2^-149, and their packed parts are multiples of
// 2^-125, which are zero or large enough for the units. A sum that the units
// treat as zero is below 2^-126 there, and below 2^-174 in the result: each of
// their roundings loses less than 2^-24 of the 2^-150 that a rounding of
// float32 may lose. So with S, the sum of the magnitudes of the products, the
// error of a sum of n of them is at most
//   n 2^-24 S   for float32's roundings and the omitted products
//   + 2^-150    for rounding to a denormal float32, once when it is read
//   + n 2^-169  for sums treated as zero in at most 2^5 roundings each
// whatever the magnitudes of the operands are. float16 numbers, multiples of
// 2^-24, are not scaled: their parts and sums are never small.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>

#include "base/dtype.h"
#include "dense/tile/units.h"

namespace popsim::dense {

// The number of parts for numbers with this many significant bits.
[[nodiscard]] constexpr int num_parts_of(int significant_bits) {
  return significant_bits <= 8 ? 1 : significant_bits <= 16 ? 2 : 3;
}

// A matrix; a product adds up along one of its axes, the depth. One of the
// strides is 1. Strides are in elements.
struct PartSource {
  const void* data;
  DType dtype;  // float32, float16 or bfloat16
  int64_t rows;
  int64_t depth;
  int64_t row_stride;
  int64_t depth_stride;
};

// The contents of a tile of the units: kTileRows rows, each with kStepDepth
// numbers along the depth. For the right operand, rows of pairs along the
// depth, with one pair for each of kTileRows columns. Both have the same order
// of the depth.
enum class TileOrder : int8_t { kRows, kPairs };

struct PartBlock {
  int64_t first_row;  // of at most kBlock
  int64_t first_depth;
  int64_t num_steps;  // of kStepDepth; beyond the source there are zeros
  uint16_t* out;      // [num_steps][num_parts][2 tiles]
};

// The factor for numbers of a dtype when they are packed, and the factor for
// sums of products of packed numbers when they are read.
[[nodiscard]] constexpr float packed_scale(DType dtype) {
  return dtype == DType::kFloat16 ? 1.0F : 0x1p24F;
}
[[nodiscard]] constexpr float sum_scale(DType dtype) {
  return 1.0F / packed_scale(dtype) / packed_scale(dtype);
}

// Decides from the sums of squares of two operands whether their parts give the
// right sums of products. If so, no sum overflows (its square is at most the
// product of the operands' sums of squares, which leaves room for the scale and
// for the rounding to parts), and no number is infinite or NaN. Otherwise the
// later parts may give wrong results: infinities and NaN are multiplied with
// zeros there, and sums beyond float32 become infinite, with either sign.
// `num_sums`: the number of such sums that are added up.
[[nodiscard]] constexpr bool are_ordinary(float a, float b, int64_t num_sums) {
  constexpr double kLargest = 0x1p76;  // 2^48 times this is 2^124
  const auto count = static_cast<double>(num_sums);
  return count * count * a * b < kLargest * kLargest;
}

// The largest of the numbers that several threads found; NaN if one of them
// found NaN.
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

// Returns the sum of the numbers' squares, slightly rounded, plus about 2^-55.
using PackFunction = float (*)(const PartSource& source,
                               const PartBlock& block);
[[nodiscard]] PackFunction pack_function(DType dtype, int num_parts,
                                         TileOrder order);

// A row of positions with up to kTileRows numbers each.
struct PositionRow {
  const float* data;
  int64_t offset;  // of position 0, which need not exist
  int64_t stride;  // between positions
  int64_t first;   // to `last`: positions that exist; others are zeros
  int64_t last;
  int64_t lanes;  // numbers at a position; those up to kTileRows are zero
};

// Packs `count` positions, each as a row of a tile: number i of `low` and
// number i of `high` are adjacent. Writes them to `out`; each further part is
// `part` numbers later. Returns the sum of squares as described above.
using PackRowFunction = float (*)(const PositionRow& low,
                                  const PositionRow& high, int64_t count,
                                  uint16_t* out, int64_t part);
[[nodiscard]] PackRowFunction pack_row_function(int num_parts);

// Transposes a tile of pairs of numbers. `to` must not be `from`.
void transpose_tile(const uint16_t* from, uint16_t* to);

}  // namespace popsim::dense
