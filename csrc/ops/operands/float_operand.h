// The operands of the dense kernels: tensors of any floating type and layout
// as float32 memory.
//
// float32 tensors are used where they are. The others pass through the
// workspace: half in, float32 inside, half out, as on the device.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "ops/operands/floats.h"

namespace popsim::ops {

// Scratch memory of a kernel, planned in prepare and valid during run(). All
// kernels of a thread share one block, since they take turns: it stays in the
// caches and is as big as the neediest kernel.
class Workspace {
 public:
  // Returns the offset of a new buffer, aligned to 64 bytes.
  size_t add(size_t bytes);
  // The planned memory on the calling thread. Allocates only when no earlier
  // run on this thread needed as much.
  [[nodiscard]] char* memory() const;

 private:
  size_t bytes_ = 0;
};

// A tensor seen with a shape and strides of the kernel's choice.
struct FloatView {
  graph::TensorId id;
  DType dtype;
  Shape shape;
  Strides strides;
};

class FloatInput {
 public:
  // `order`: the axes of the packed buffer, from the outermost to the
  // innermost. A float32 tensor stays where it is if its elements are in that
  // order already or if `keep` says that the kernel can work with its strides.
  FloatInput(const FloatView& view, const std::vector<size_t>& order, bool keep,
             Workspace& workspace);
  // Contiguous.
  FloatInput(graph::TensorId id, const graph::Tensor& tensor,
             Workspace& workspace);

  // Strides of the memory that load() returns.
  [[nodiscard]] const Strides& strides() const { return strides_; }
  [[nodiscard]] float* load(const RunContext& context, char* workspace) const;

 private:
  graph::TensorId id_;
  int64_t numel_;
  Strides strides_;
  // Set only where the tensor does not stay where it is.
  std::optional<FloatGather> gather_;  // in the order of the buffer
  size_t offset_ = 0;                  // of the buffer
};

// Writes a tensor, repeated along axes of stride 0, to contiguous memory.
class FloatBroadcast {
 public:
  explicit FloatBroadcast(const FloatView& view);

  void write(const RunContext& context, float* out) const;

 private:
  graph::TensorId id_;
  int64_t numel_;
  FloatGather gather_;
};

// A contiguous output, or one with the channels last: the buffer is in the
// order of its memory.
class FloatOutput {
 public:
  FloatOutput(graph::TensorId id, const graph::Tensor& tensor,
              Workspace& workspace);

  // Memory for the result, to be filled and stored.
  [[nodiscard]] float* buffer(const RunContext& context, char* workspace) const;
  void store(const RunContext& context, const char* workspace) const;

 private:
  FloatWriter writer_;
  int64_t numel_;
  size_t offset_ = 0;
};

// True for the types that the dense kernels compute in float32.
[[nodiscard]] bool computes_in_float32(DType dtype);

}  // namespace popsim::ops
