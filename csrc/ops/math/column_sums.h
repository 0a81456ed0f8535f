// Sums over the rows of a matrix, for many columns at a time.
#pragma once

#include <ATen/cpu/vec/vec.h>

#include <array>
#include <cstddef>
#include <cstdint>

namespace popsim::ops {

inline constexpr int64_t kVectorLanes = at::vec::Vectorized<float>::size();

template <size_t kSums, size_t kVectors, typename Add>
void add_tile_sums(int64_t rows, int64_t width, int64_t first, int64_t lanes,
                   const std::array<float*, kSums>& sums, const Add& add) {
  using Vec = at::vec::Vectorized<float>;
  std::array<std::array<Vec, kSums>, kVectors> totals;
  for (auto& of_vector : totals) of_vector.fill(Vec(0.0f));
  for (int64_t row = 0; row < rows; ++row) {
    for (size_t v = 0; v < kVectors; ++v) {
      const int64_t column = first + static_cast<int64_t>(v) * kVectorLanes;
      add(column, row * width + column, lanes, totals[v]);
    }
  }
  for (size_t s = 0; s < kSums; ++s) {
    for (size_t v = 0; v < kVectors; ++v) {
      totals[v][s].store(
          sums[s] + first + static_cast<int64_t>(v) * kVectorLanes, lanes);
    }
  }
}

// Writes kSums sums for each of the `width` columns of a contiguous matrix.
// `add(column, offset, lanes, totals)` adds the terms of `lanes` neighbouring
// elements of one row to their sums, which are vectors.
template <size_t kSums, typename Add>
void column_sums(int64_t rows, int64_t width,
                 const std::array<float*, kSums>& sums, const Add& add) {
  constexpr size_t kVectors = 4;
  constexpr int64_t kTile = kVectors * kVectorLanes;
  int64_t column = 0;
  for (; column + kTile <= width; column += kTile) {
    add_tile_sums<kSums, kVectors>(rows, width, column, kVectorLanes, sums,
                                   add);
  }
  for (; column + kVectorLanes <= width; column += kVectorLanes) {
    add_tile_sums<kSums, 1>(rows, width, column, kVectorLanes, sums, add);
  }
  if (column < width) {
    add_tile_sums<kSums, 1>(rows, width, column, width - column, sums, add);
  }
}

}  // namespace popsim::ops
