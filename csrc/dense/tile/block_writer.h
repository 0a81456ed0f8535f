// Writes rows of a product's output, of any dtype, from float32 sums.
#pragma once

#include <ATen/cpu/vec/vec.h>

#include <array>
#include <cstdint>

#include "dense/problem/product_row.h"
#include "dense/tile/units.h"

namespace popsim::dense {

// Writes multiples of the sums of a product to `to`, which may be the memory of
// the sums.
inline void scale_sums(const BlockProduct& product, float scale, float* to,
                       int64_t stride) {
  using Vec = at::vec::Vectorized<float>;
  const Vec factor(scale);
  const int64_t rows = product.two_row_tiles ? kBlock : kTileRows;
  const int64_t columns = product.two_column_tiles ? kBlock : kTileRows;
  for (int64_t i = 0; i < rows; ++i) {
    const float* from = product.sums + i * product.sum_stride;
    for (int64_t j = 0; j < columns; j += Vec::size()) {
      (factor * Vec::loadu(from + j)).store(to + i * stride + j);
    }
  }
}

class BlockWriter {
 public:
  // `spec` must outlive it.
  explicit BlockWriter(const MatmulSpec& spec) : spec_(spec), row_(spec) {}

  // Whether the sums are the result.
  [[nodiscard]] bool plain() const {
    return row_.plain() && spec_.result_type == DType::kFloat32;
  }

  // `offset`: offset of the first element in c; `column`: column of the first
  // element.
  void write(const MatmulOperands& operands, const float* sums, int64_t rows,
             int64_t columns, int64_t offset, int64_t column) const {
    for (int64_t i = 0; i < rows; ++i) {
      const float* from = sums + i * kBlock;
      const int64_t at = offset + i * spec_.n;
      if (spec_.result_type == DType::kFloat32) {
        row_.finish(operands, from, columns, at, column,
                    operands.c_floats() + at);
        continue;
      }
      alignas(64) std::array<float, static_cast<size_t>(kBlock)> wide;
      row_.finish(operands, from, columns, at, column, wide.data());
      if (spec_.result_type == DType::kFloat16) {
        narrow<at::Half>(wide.data(), operands.c, at, columns);
      } else {
        narrow<at::BFloat16>(wide.data(), operands.c, at, columns);
      }
    }
  }

 private:
  template <typename Narrow>
  static void narrow(const float* from, void* c, int64_t at, int64_t count) {
    at::vec::convert(from, static_cast<Narrow*>(c) + at, count);
  }

  const MatmulSpec& spec_;
  ProductRow row_;
};

}  // namespace popsim::dense
