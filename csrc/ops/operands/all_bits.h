// Keeps PyTorch's kernels from rounding float32 operands.
#pragma once

namespace popsim::ops {

// While it exists, PyTorch's kernels use all bits of float32 numbers, in the
// whole process. Otherwise they would follow the settings of PyTorch at the
// time of the run (torch.set_float32_matmul_precision); those at the time of
// the compilation count. Only oneDNN's kernels follow these settings, so it
// turns oneDNN off in PyTorch, but only if a setting asks for fewer bits.
class AllBits {
 public:
  AllBits();
  AllBits(const AllBits&) = delete;
  AllBits& operator=(const AllBits&) = delete;
  ~AllBits();

 private:
  bool counted_ = false;
};

}  // namespace popsim::ops
