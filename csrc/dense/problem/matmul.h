// Matrix products with float32 sums.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"

namespace popsim::dense {

// Distances between adjacent numbers, in elements.
struct MatrixStrides {
  int64_t batch = 0;  // 0: the same matrix for the whole batch
  int64_t row = 0;
  int64_t column = 0;

  // The elements of a row are adjacent; rows do not overlap.
  [[nodiscard]] bool row_major(int64_t columns) const {
    return column == 1 && row >= columns;
  }
  // The same for columns.
  [[nodiscard]] bool column_major(int64_t rows) const {
    return row == 1 && column >= rows;
  }
  [[nodiscard]] bool has_unit_stride() const { return row == 1 || column == 1; }
  // Whether the matrix is stored row by row or column by column.
  [[nodiscard]] bool plain(int64_t rows, int64_t columns) const {
    return row_major(columns) || column_major(rows);
  }
};

// c[batch, m, n] = alpha * (a[batch, m, k] @ b[batch, k, n]) + bias[n]
//                  + beta * c, where c is contiguous.
// Then, for products of two matrices, one of:
//   relu    max(c, 0)
//   mask    c where the mask, of c's shape, is not <= 0, else 0: the gradient
//           of relu
//   update  decay * c - rate * (a @ b), which also reads c; each run passes
//           rate and decay, and memory for a @ b itself if it is needed
struct MatmulSpec {
  int64_t batch = 1;
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  MatrixStrides a;
  MatrixStrides b;
  bool bias = false;  // only with the default alpha and beta
  float alpha = 1.0f;
  float beta = 0.0f;
  // The dtypes of a and b, and of c, in memory. Only some products support
  // dtypes other than float32 (tile/matmul.h).
  DType operand_type = DType::kFloat32;
  DType result_type = DType::kFloat32;
  // The number of significant bits of a and b that the product must use:
  // float16 and bfloat16 numbers, widened to float32, have 11 and 8. Numbers
  // that have more are rounded, or used whole where that is as fast.
  int significant_bits = 24;
  // Partial sums are float16, as described in panels.h. The operands may have
  // any strides of which one is 1.
  bool half_partials = false;
  bool relu = false;
  bool mask = false;
  bool update = false;
  bool one_thread = false;  // run() must wake no other thread
};

struct MatmulOperands {
  const void* a = nullptr;
  const void* b = nullptr;
  // Bias and mask are null if the spec has none.
  const float* bias = nullptr;
  const float* mask = nullptr;
  void* c = nullptr;
  void* workspace = nullptr;  // aligned to 64 bytes
  float rate = 0.0f;
  float decay = 0.0f;
  float* sums = nullptr;

  // For products of float32.
  [[nodiscard]] const float* a_floats() const {
    return static_cast<const float*>(a);
  }
  [[nodiscard]] const float* b_floats() const {
    return static_cast<const float*>(b);
  }
  [[nodiscard]] float* c_floats() const { return static_cast<float*>(c); }
};

// Code for one problem; `dense/matmul.h` chooses it.
class Matmul {
 public:
  Matmul() = default;
  Matmul(const Matmul&) = delete;
  Matmul& operator=(const Matmul&) = delete;
  virtual ~Matmul() = default;

  // The bytes of memory that run() needs besides the matrices.
  [[nodiscard]] virtual size_t workspace_bytes() const = 0;
  virtual void run(const MatmulOperands& operands) = 0;

  void run(const float* a, const float* b, const float* bias, float* c,
           void* workspace) {
    run({.a = a, .b = b, .bias = bias, .c = c, .workspace = workspace});
  }
};

}  // namespace popsim::dense
