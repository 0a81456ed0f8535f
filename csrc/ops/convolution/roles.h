// Convolution ops as convolutions of csrc/dense or gradients of them.
//
// A transposed convolution is the gradient of a convolution: its input
// corresponds to that convolution's output, and its output to that
// convolution's input.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "dense/problem/convolution.h"
#include "ops/convolution/geometry.h"

namespace popsim::ops {

// The convolution that `g` is, or whose gradient `g` is.
[[nodiscard]] dense::ConvolutionSpec dense_spec(const ConvolutionGeometry& g);

using ConvolutionSlot = float* dense::ConvolutionTensors::*;

// The roles of an op's tensors in the convolution of csrc/dense.
struct ConvolutionRoles {
  dense::ConvolutionPass pass;
  std::vector<std::pair<size_t, ConvolutionSlot>> inputs;
  std::vector<std::pair<size_t, ConvolutionSlot>> outputs;
  bool bias;
};

[[nodiscard]] ConvolutionRoles forward_roles(const OpView& op,
                                             const ConvolutionGeometry& g);
[[nodiscard]] ConvolutionRoles grad_input_roles(const OpView& op,
                                                const ConvolutionGeometry& g);
[[nodiscard]] ConvolutionRoles grad_weight_roles(const OpView& op,
                                                 const ConvolutionGeometry& g);

// The axes of a tensor from the outermost to the innermost one.
[[nodiscard]] std::vector<size_t> axes_in(dense::Order order, size_t rank);

}  // namespace popsim::ops
