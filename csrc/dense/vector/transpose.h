// Transposes of small blocks of matrices.
#pragma once

#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace popsim::dense {

// to[k * to_stride + i] = from[i * from_stride + k] for i and k below kSide.
template <int kSide, typename T>
inline void transpose_square(const T* from, int64_t from_stride, T* to,
                             int64_t to_stride) {
  if constexpr (std::is_same_v<T, float> || std::is_same_v<T, c10::Half>) {
    at::vec::transpose_mxn<T, kSide, kSide>(from, from_stride, to, to_stride);
  } else {
    for (int64_t k = 0; k < kSide; ++k) {
      for (int64_t i = 0; i < kSide; ++i) {
        to[k * to_stride + i] = from[i * from_stride + k];
      }
    }
  }
}

// The same for i < rows and k < columns, both at most kSide.
template <int kSide>
inline void transpose_block(const float* from, int64_t from_stride, float* to,
                            int64_t to_stride, int64_t rows, int64_t columns) {
  if (rows == kSide && columns == kSide) {
    transpose_square<kSide>(from, from_stride, to, to_stride);
    return;
  }
  for (int64_t k = 0; k < columns; ++k) {
    for (int64_t i = 0; i < rows; ++i) {
      to[k * to_stride + i] = from[i * from_stride + k];
    }
  }
}

// The same, and fills the rows of `to` with zeros up to kSide elements.
template <int kSide>
inline void transpose_padded(const float* from, int64_t from_stride, float* to,
                             int64_t to_stride, int64_t rows, int64_t columns) {
  transpose_block<kSide>(from, from_stride, to, to_stride, rows, columns);
  if (rows == kSide) return;
  for (int64_t k = 0; k < columns; ++k) {
    std::fill(to + k * to_stride + rows, to + k * to_stride + kSide, 0.0F);
  }
}

}  // namespace popsim::dense
