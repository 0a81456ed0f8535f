// Tensors as rows of floats: the operands of norms and softmaxes.
#pragma once

#include "ops/op_def.h"
#include "ops/operands/float_conversion.h"
#include "ops/operands/strided_walk.h"

namespace popsim::ops {

// Reads rows of a tensor of any floating type and strides.
class RowInput {
 public:
  RowInput(const OpView& op, size_t input, int64_t width)
      : id_(op.input_id(input)),
        width_(width),
        load_(load_floats(op.input(input).dtype)),
        walk_(op.input(input).shape, op.input(input).strides),
        in_place_(op.input(input).dtype == DType::kFloat32 &&
                  op.input(input).contiguous()) {}

  // True: read() uses no scratch memory.
  [[nodiscard]] bool in_place() const { return in_place_; }
  // Elements [first, first + count) of a row, in place or in `scratch`.
  [[nodiscard]] const float* read(const RunContext& context, int64_t row,
                                  int64_t first, int64_t count,
                                  float* scratch) const {
    const int64_t begin = row * width_ + first;
    if (in_place_) return context.data<const float>(id_) + begin;
    const void* source = context.data(id_);
    float* out = scratch;
    walk_.for_each_run(begin, count,
                       [&](int64_t offset, int64_t stride, int64_t run) {
                         load_(source, offset, stride, run, out);
                         out += run;
                       });
    return scratch;
  }
  [[nodiscard]] const float* read(const RunContext& context, int64_t row,
                                  float* scratch) const {
    return read(context, row, 0, width_, scratch);
  }

 private:
  graph::TensorId id_;
  int64_t width_;
  LoadFloats load_;
  StridedWalk walk_;
  bool in_place_;
};

// Writes rows of a contiguous tensor of any floating type.
class RowOutput {
 public:
  RowOutput(const OpView& op, size_t output, int64_t width)
      : id_(op.output_id(output)),
        width_(width),
        store_(store_floats(op.output(output).dtype)),
        in_place_(op.output(output).dtype == DType::kFloat32) {
    check_internal(op.output(output).contiguous(), op.op().kind, " '",
                   op.op().name, "': output ", output, " is not contiguous");
  }

  // True: space() uses no scratch memory.
  [[nodiscard]] bool in_place() const { return in_place_; }
  // Where to compute a row: in place or in `scratch`.
  [[nodiscard]] float* space(const RunContext& context, int64_t row,
                             float* scratch) const {
    return in_place_ ? context.data<float>(id_) + row * width_ : scratch;
  }
  // To be called with what space() gave.
  void store(const RunContext& context, int64_t row,
             const float* values) const {
    if (!in_place_) write(context, row, 0, width_, values);
  }
  // Writes elements [first, first + count) of a row.
  void write(const RunContext& context, int64_t row, int64_t first,
             int64_t count, const float* values) const {
    store_(values, false, context.data(id_), row * width_ + first, count);
  }

 private:
  graph::TensorId id_;
  int64_t width_;
  StoreFloats store_;
  bool in_place_;
};

// Floats rounded up so that the buffers of a task start on cache lines of
// their own.
[[nodiscard]] inline int64_t padded(int64_t floats) {
  return (floats + 31) / 16 * 16;
}

}  // namespace popsim::ops
