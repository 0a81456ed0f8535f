// Copies rows of a matrix into panels, which are the columns of a register
// tile.
#pragma once

#include <algorithm>
#include <cstdint>

#include "dense/vector/register_tile.h"

namespace popsim::dense {

// The number of panels that are copied together. Each row is then read in
// pieces larger than a cache line, and the written memory stays in the
// first-level cache.
inline constexpr int64_t kPackedPanels = 4;

// packed[panel][row][column] = b[row][column] for `columns` columns, with zeros
// after the last one. The rows of b are `stride` apart.
inline void pack_rows(const float* b, int64_t stride, int64_t columns,
                      int64_t rows, float* packed) {
  constexpr int64_t kTogether = kPackedPanels * kTileColumns;
  for (int64_t first = 0; first < columns; first += kTogether) {
    const int64_t end = std::min(first + kTogether, columns);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t column = first; column < end; column += kTileColumns) {
        const int64_t count = std::min(kTileColumns, end - column);
        float* to = packed + column * rows + row * kTileColumns;
        const float* from = b + row * stride + column;
        if (count == kTileColumns) {
          std::copy_n(from, kTileColumns, to);
        } else {
          std::copy_n(from, count, to);
          std::fill(to + count, to + kTileColumns, 0.0F);
        }
      }
    }
  }
}

}  // namespace popsim::dense
