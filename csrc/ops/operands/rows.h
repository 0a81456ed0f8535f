// Tensors as rows of floats: the operands of norms and softmaxes.
#pragma once

#include "ops/operands/floats.h"

namespace popsim::ops {

// Reads rows of a tensor of any floating-point dtype and strides.
class RowInput {
 public:
  RowInput(const OpView& op, size_t input, int64_t width)
      : reader_(op, input), width_(width) {}

  // If true, read() uses no scratch memory.
  [[nodiscard]] bool in_place() const { return reader_.in_place(); }
  // Returns elements [first, first + count) of a row, in place or in `scratch`.
  [[nodiscard]] const float* read(const RunContext& context, int64_t row,
                                  int64_t first, int64_t count,
                                  float* scratch) const {
    return reader_.read(context, row * width_ + first, count, scratch);
  }
  [[nodiscard]] const float* read(const RunContext& context, int64_t row,
                                  float* scratch) const {
    return read(context, row, 0, width_, scratch);
  }

 private:
  FloatReader reader_;
  int64_t width_;
};

// Writes rows of a contiguous tensor of any floating-point dtype.
class RowOutput {
 public:
  RowOutput(const OpView& op, size_t output, int64_t width)
      : writer_(op, output), width_(width) {}

  // If true, space() uses no scratch memory.
  [[nodiscard]] bool in_place() const { return writer_.in_place(); }
  // The memory for computing a row: in place or in `scratch`.
  [[nodiscard]] float* space(const RunContext& context, int64_t row,
                             float* scratch) const {
    return writer_.space(context, row * width_, scratch);
  }
  // `values` must be the memory that space() returned for this row.
  void store(const RunContext& context, int64_t row,
             const float* values) const {
    writer_.store(context, row * width_, width_, values);
  }
  // Writes elements [first, first + count) of a row.
  void write(const RunContext& context, int64_t row, int64_t first,
             int64_t count, const float* values) const {
    writer_.write(context, row * width_ + first, count, values);
  }

 private:
  FloatWriter writer_;
  int64_t width_;
};

// A number of floats rounded up, so that each buffer of a task starts on its
// own cache line.
[[nodiscard]] inline int64_t padded(int64_t floats) {
  return (floats + 31) / 16 * 16;
}

}  // namespace popsim::ops
