// Sums over the rows of a matrix, many columns at a time.
#pragma once

#include <ATen/cpu/vec/vec.h>

#include <array>
#include <cstddef>
#include <cstdint>

namespace popsim::ops {

inline constexpr int64_t kVectorLanes = at::vec::Vectorized<float>::size();

template <size_t kSums, size_t kVectors, typename Term>
void add_tile_sums(int64_t rows, int64_t width, int64_t first, int64_t lanes,
                   const std::array<float*, kSums>& sums, const Term& term) {
  using Vec = at::vec::Vectorized<float>;
  std::array<std::array<Vec, kVectors>, kSums> totals;
  for (auto& of_sum : totals) of_sum.fill(Vec(0.0f));
  for (int64_t row = 0; row < rows; ++row) {
    for (size_t v = 0; v < kVectors; ++v) {
      const int64_t column = first + static_cast<int64_t>(v) * kVectorLanes;
      const std::array<Vec, kSums> terms =
          term(column, row * width + column, lanes);
      for (size_t s = 0; s < kSums; ++s) {
        totals[s][v] = totals[s][v] + terms[s];
      }
    }
  }
  for (size_t s = 0; s < kSums; ++s) {
    for (size_t v = 0; v < kVectors; ++v) {
      totals[s][v].store(
          sums[s] + first + static_cast<int64_t>(v) * kVectorLanes, lanes);
    }
  }
}

// Writes kSums sums for each of the `width` columns of a contiguous matrix.
// `term(column, offset, lanes)` gives the terms of `lanes` neighbours in one
// row, as vectors.
template <size_t kSums, typename Term>
void column_sums(int64_t rows, int64_t width,
                 const std::array<float*, kSums>& sums, const Term& term) {
  constexpr size_t kVectors = 4;
  constexpr int64_t kTile = kVectors * kVectorLanes;
  int64_t column = 0;
  for (; column + kTile <= width; column += kTile) {
    add_tile_sums<kSums, kVectors>(rows, width, column, kVectorLanes, sums,
                                   term);
  }
  for (; column + kVectorLanes <= width; column += kVectorLanes) {
    add_tile_sums<kSums, 1>(rows, width, column, kVectorLanes, sums, term);
  }
  if (column < width) {
    add_tile_sums<kSums, 1>(rows, width, column, width - column, sums, term);
  }
}

}  // namespace popsim::ops
