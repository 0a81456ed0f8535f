// Tensors of any floating-point dtype and layout as float32 memory, some
// elements at a time: in place, or in scratch memory.
#pragma once

#include "ops/op_def.h"
#include "ops/operands/float_conversion.h"
#include "ops/operands/strided_walk.h"

namespace popsim::ops {

// Collects elements of a tensor in row-major order.
class FloatGather {
 public:
  FloatGather(DType dtype, const Shape& shape, const Strides& strides)
      : load_(load_floats(dtype)), walk_(shape, strides) {}

  // Writes elements [first, first + count) to `out`. The tensor begins `start`
  // elements after `source`.
  void read(const void* source, int64_t first, int64_t count, float* out,
            int64_t start = 0) const {
    walk_.for_each_run(first, count,
                       [&](int64_t offset, int64_t stride, int64_t run) {
                         load_(source, start + offset, stride, run, out);
                         out += run;
                       });
  }

 private:
  LoadFloats load_;
  StridedWalk walk_;
};

// Reads an input in row-major order.
class FloatReader {
 public:
  FloatReader(const OpView& op, size_t input)
      : id_(op.input_id(input)),
        gather_(op.input(input).dtype, op.input(input).shape,
                op.input(input).strides),
        in_place_(op.input(input).dtype == DType::kFloat32 &&
                  op.input(input).contiguous()) {}

  // If true, read() uses no scratch memory.
  [[nodiscard]] bool in_place() const { return in_place_; }
  // Returns elements [first, first + count), in place or in `scratch`.
  [[nodiscard]] const float* read(const RunContext& context, int64_t first,
                                  int64_t count, float* scratch) const {
    if (in_place_) return context.data<const float>(id_) + first;
    gather_.read(context.data(id_), first, count, scratch);
    return scratch;
  }

 private:
  graph::TensorId id_;
  FloatGather gather_;
  bool in_place_;
};

// Writes an output in the order of its memory.
class FloatWriter {
 public:
  FloatWriter(graph::TensorId id, DType dtype)
      : id_(id),
        store_(store_floats(dtype)),
        in_place_(dtype == DType::kFloat32) {}
  // Throws InternalError if the output is not contiguous.
  FloatWriter(const OpView& op, size_t output)
      : FloatWriter(op.output_id(output), op.output(output).dtype) {
    check_internal(op.output(output).contiguous(), op.op().kind, " '",
                   op.op().name, "': output ", output, " is not contiguous");
  }

  // If true, space() uses no scratch memory.
  [[nodiscard]] bool in_place() const { return in_place_; }
  // The memory for computing elements [first, ...): in place or in `scratch`.
  [[nodiscard]] float* space(const RunContext& context, int64_t first,
                             float* scratch) const {
    return in_place_ ? context.data<float>(id_) + first : scratch;
  }
  // Writes the contents of space(), rounded to the dtype.
  void store(const RunContext& context, int64_t first, int64_t count,
             const float* values) const {
    if (!in_place_) write(context, first, count, values);
  }
  // Writes elements [first, first + count) from any memory.
  void write(const RunContext& context, int64_t first, int64_t count,
             const float* values) const {
    store_(values, /*uniform=*/false, context.data(id_), first, count);
  }

 private:
  graph::TensorId id_;
  StoreFloats store_;
  bool in_place_;
};

}  // namespace popsim::ops
