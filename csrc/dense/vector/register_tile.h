// A tile of a product, some rows by some vectors of columns, whose sums stay in
// registers.
#pragma once

#include <ATen/cpu/vec/vec.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/numbers.h"

namespace popsim::dense {

inline constexpr int64_t kTileLanes = at::vec::Vectorized<float>::size();
// This number of sums, and some operands, fill the registers.
inline constexpr int kMaxTileRows = kTileLanes >= 16 ? 14 : 6;
inline constexpr int kMaxTileVectors = 2;
inline constexpr int64_t kTileColumns = kMaxTileVectors * kTileLanes;
inline constexpr bool kLongVectors = kTileLanes >= 16;
// Rows at distances that are multiples of this evict each other from the
// first-level cache, and some hundreds of them from the second-level cache.
inline constexpr int64_t kBadStride = 1024;

// Whether the rows of columns are too far apart to be read in place repeatedly.
// With long vectors, which are whole cache lines, a copy takes longer than it
// saves (measured).
[[nodiscard]] constexpr bool has_bad_rows(int64_t stride) {
  return !kLongVectors && stride % kBadStride == 0;
}

// An axis divided into equal pieces of at most `limit`.
struct Pieces {
  Pieces(int64_t size, int64_t limit)
      : size(size), count(ceil_div(size, limit)) {}

  [[nodiscard]] int64_t begin(int64_t i) const { return size * i / count; }
  [[nodiscard]] int64_t length(int64_t i) const {
    return begin(i + 1) - begin(i);
  }

  int64_t size;
  int64_t count;
};

// Elements along the depth of the product are `step` apart; rows (of the left
// operand) are `row` apart.
struct TileLeft {
  const float* data;
  int64_t row;
  int64_t step;
};
struct TileRight {
  const float* data;  // vectors of columns
  int64_t step;
};
struct TileOutput {
  float* data;
  int64_t row;
  // For an update; if it needs the sums themselves, they are written to `sums`.
  float rate = 0.0F;
  float decay = 0.0F;
  float* sums = nullptr;
  // The operations after other sums, in this order: a bias for each column;
  // relu; zeros where the mask, which has the output's layout, is not positive.
  const float* bias = nullptr;
  bool relu = false;
  const float* mask = nullptr;
};

// The new value of the output.
enum class TileResult : int8_t {
  kStore,  // the sums
  kAdd,    // output + sums
  kUpdate  // decay * output - rate * sums
};

// sums[i][j] = sum over the depth of left[i][d] * right[d][j], in order. Reads
// and writes whole vectors, even beyond the last column.
void run_tile(const TileLeft& left, const TileRight& right, int64_t rows,
              int64_t columns, int64_t depth, const TileOutput& out,
              TileResult result);

// The same for any depth: adds up sums of at most `longest` products, because
// the error of such a sum grows with its length. The operations after the sums
// come last.
void run_deep_tile(const TileLeft& left, const TileRight& right, int64_t rows,
                   int64_t columns, int64_t depth, int64_t longest,
                   const TileOutput& out,
                   TileResult result = TileResult::kStore);

struct alignas(64) TileBuffer {
  std::array<float, static_cast<size_t>(kMaxTileRows* kTileColumns)> floats;

  [[nodiscard]] float* row(int64_t i) {
    return floats.data() + i * kTileColumns;
  }
  [[nodiscard]] TileOutput output() { return {floats.data(), kTileColumns}; }
};

}  // namespace popsim::dense
