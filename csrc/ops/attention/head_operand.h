// Operands of products that are processed matrix by matrix: the heads of
// attention.
#pragma once

#include <optional>

#include "ops/operands/float_operand.h"
#include "ops/operands/matrices.h"

namespace popsim::ops {

// Matrices of any floating-point dtype and layout; each is loaded as float32
// memory. The memory has the same layout that FloatInput gives the same operand
// of a batched product.
class HeadInput {
 public:
  HeadInput(const OpView& op, size_t input, Workspace& workspace);

  // The sizes and strides of the matrix that load() returns.
  [[nodiscard]] int64_t rows() const { return matrix_.rows; }
  [[nodiscard]] int64_t columns() const { return matrix_.columns; }
  [[nodiscard]] const dense::MatrixStrides& strides() const {
    return matrix_.strides;
  }
  [[nodiscard]] const float* load(const RunContext& context, int64_t head,
                                  char* workspace) const;

 private:
  graph::TensorId id_;
  Matrices matrix_;
  int64_t batch_stride_;
  std::optional<FloatGather> gather_;  // absent if the matrix stays in place
  size_t offset_ = 0;
};

// Contiguous matrices, stored one at a time.
class HeadOutput {
 public:
  HeadOutput(const OpView& op, size_t output, Workspace& workspace);

  // Memory for rows [row, ...) of a head's result; fill it, then call store().
  [[nodiscard]] float* space(const RunContext& context, int64_t head,
                             int64_t row, char* workspace) const;
  void store(const RunContext& context, int64_t head, int64_t row,
             int64_t num_rows, const char* workspace) const;

 private:
  [[nodiscard]] int64_t first(int64_t head, int64_t row) const {
    return (head * rows_ + row) * columns_;
  }

  FloatWriter writer_;
  int64_t rows_;
  int64_t columns_;
  size_t offset_ = 0;  // of the buffer for a whole head
};

}  // namespace popsim::ops
