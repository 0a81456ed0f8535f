// The input positions that a convolution's kernel covers, for each position
// that it computes.
#pragma once

#include <cstdint>
#include <vector>

#include "dense/problem/convolution.h"

namespace popsim::ops {

// For each position of the target, the positions of the source that are
// multiplied with the elements of the kernel, in the order of these.
class PatchMap {
 public:
  // The map from a convolution's input to its output.
  [[nodiscard]] static PatchMap forward(const dense::ConvolutionSpec& spec);
  // The map from a convolution's output to its input, for the gradient.
  [[nodiscard]] static PatchMap backward(const dense::ConvolutionSpec& spec);

  [[nodiscard]] int64_t num_sources() const { return num_sources_; }
  [[nodiscard]] int64_t num_targets() const { return num_targets_; }
  [[nodiscard]] int64_t kernel_size() const { return kernel_size_; }
  // One position for each element of the kernel; negative outside the source.
  [[nodiscard]] const int32_t* sources(int64_t target) const {
    return sources_.data() + target * kernel_size_;
  }

 private:
  // One spatial axis: [target][kernel] -> source.
  struct Axis {
    int64_t num_sources;
    int64_t num_targets;
    int64_t kernel_size;
    std::vector<int64_t> sources;
  };
  static Axis forward_axis(const dense::ConvolutionSpec& spec, size_t axis);
  static Axis backward_axis(const dense::ConvolutionSpec& spec, size_t axis);
  // Adds an axis inside the present ones.
  void append(const Axis& axis);

  int64_t num_sources_ = 1;
  int64_t num_targets_ = 1;
  int64_t kernel_size_ = 1;
  std::vector<int32_t> sources_{0};
};

}  // namespace popsim::ops
