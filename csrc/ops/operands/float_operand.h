// The operands of the dense kernels: tensors of any floating-point dtype and
// layout as float32 memory.
//
// float32 tensors are used in place. Others are converted in the workspace: the
// tensors are 16-bit, the computation is float32, as on the device.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "ops/operands/floats.h"

namespace popsim::ops {

// Scratch memory of a kernel, planned in prepare and valid during run(). All
// kernels of a thread share one block, because only one of them runs at a time:
// the block stays in the caches and is as large as the largest need of a
// kernel.
class Workspace {
 public:
  // Returns the offset of a new buffer, aligned to 64 bytes.
  size_t add(size_t bytes);
  // The planned memory of the calling thread. Allocates only if no earlier run
  // on this thread needed as much.
  [[nodiscard]] char* memory() const;

 private:
  size_t bytes_ = 0;
};

// A tensor with a shape and strides that the kernel chooses.
struct FloatView {
  graph::TensorId id;
  DType dtype;
  Shape shape;
  Strides strides;
};

class FloatInput {
 public:
  // `order`: the axes of the packed buffer, from the outermost to the innermost
  // one. A float32 tensor stays in place if its elements are in that order
  // already, or if `keep` says that the kernel can use its strides.
  FloatInput(const FloatView& view, const std::vector<size_t>& order, bool keep,
             Workspace& workspace);
  // The memory is contiguous.
  FloatInput(graph::TensorId id, const graph::Tensor& tensor,
             Workspace& workspace);

  // The strides of the memory that load() returns.
  [[nodiscard]] const Strides& strides() const { return strides_; }
  [[nodiscard]] float* load(const RunContext& context, char* workspace) const;

 private:
  graph::TensorId id_;
  int64_t numel_;
  Strides strides_;
  // Set only if the tensor is not used in place.
  std::optional<FloatGather> gather_;  // in the order of the buffer
  size_t offset_ = 0;                  // of the buffer
};

// Writes a tensor to contiguous memory, and repeats it along axes of stride 0.
class FloatBroadcast {
 public:
  explicit FloatBroadcast(const FloatView& view);

  void write(const RunContext& context, float* out) const;

 private:
  graph::TensorId id_;
  int64_t numel_;
  FloatGather gather_;
};

// A contiguous or channels-last output: the buffer has the order of its memory.
class FloatOutput {
 public:
  FloatOutput(graph::TensorId id, const graph::Tensor& tensor,
              Workspace& workspace);

  // Memory for the result; fill it, then call store().
  [[nodiscard]] float* buffer(const RunContext& context, char* workspace) const;
  void store(const RunContext& context, const char* workspace) const;

 private:
  FloatWriter writer_;
  int64_t numel_;
  size_t offset_ = 0;
};

// Whether the dense kernels compute the dtype in float32.
[[nodiscard]] bool computes_in_float32(DType dtype);

}  // namespace popsim::ops
