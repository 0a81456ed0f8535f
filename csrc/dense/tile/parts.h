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

#include <atomic>
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

// From here on float32 numbers, seen as bits without the sign, round to an
// infinite bfloat16, or are infinite or NaN themselves.
inline constexpr uint32_t kTooLarge = 0x7f7f8000;

// Whether the parts of two operands with these largest magnitudes, as the bits
// of float32 numbers, give their product. Otherwise products of the following
// parts may be other than small: infinities and NaN meet zeros there, and
// products beyond float32 are infinite with either sign.
[[nodiscard]] constexpr bool are_ordinary(uint32_t a, uint32_t b) {
  constexpr uint32_t kExponentShift = 23;
  constexpr uint32_t kBias = 127;
  constexpr uint32_t kMaxExponent = 2 * kBias + 110;
  return a < kTooLarge && b < kTooLarge &&
         (a >> kExponentShift) + (b >> kExponentShift) < kMaxExponent;
}

// The largest of what several threads found.
class LargestMagnitude {
 public:
  void add(uint32_t magnitude) {
    uint32_t before = value_;
    while (before < magnitude &&
           !value_.compare_exchange_weak(before, magnitude)) {
    }
  }
  [[nodiscard]] uint32_t value() const { return value_; }

 private:
  std::atomic<uint32_t> value_ = 0;
};

// Returns the largest magnitude of the numbers as the bits of a float32; 0 for
// a single part, where nobody needs it. `bounded`: rounds finite numbers to
// finite ones, which takes longer.
using PackFunction = uint32_t (*)(const PartSource& source,
                                  const PartBlock& block);
[[nodiscard]] PackFunction pack_function(DType dtype, int num_parts,
                                         TileOrder order, bool bounded);

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
// `part` numbers further each. Returns the largest magnitude as above.
using PackRowFunction = uint32_t (*)(const PositionRow& low,
                                     const PositionRow& high, int64_t count,
                                     uint16_t* out, int64_t part);
[[nodiscard]] PackRowFunction pack_row_function(int num_parts);

// Turns a tile around: pairs of numbers change places. `to` may not be `from`.
void transpose_tile(const uint16_t* from, uint16_t* to);

}  // namespace popsim::dense
