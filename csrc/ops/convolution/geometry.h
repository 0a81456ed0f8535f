// Shapes and attributes of the convolution ops.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ops/op_def.h"

namespace popsim::ops {

// Positions of inputs and outputs.
inline constexpr size_t kX = 0;  // convolution
inline constexpr size_t kWeight = 1;
inline constexpr size_t kBias = 2;
inline constexpr size_t kGradY = 0;     // both gradients
inline constexpr size_t kForwardX = 1;  // convolution_grad_weight

struct ConvolutionGeometry {
  Shape x;
  Shape weight;
  Shape y;
  std::vector<int64_t> stride;
  std::vector<int64_t> padding;
  std::vector<int64_t> dilation;
  std::vector<int64_t> output_padding;
  bool transposed;
  int64_t groups;
};

[[nodiscard]] ConvolutionGeometry forward_geometry(const OpCall& op);
[[nodiscard]] ConvolutionGeometry grad_input_geometry(const OpCall& op);
[[nodiscard]] ConvolutionGeometry grad_weight_geometry(const OpCall& op);

// Shape rules.
[[nodiscard]] std::vector<TensorType> forward_type(const OpCall& op);
[[nodiscard]] std::vector<TensorType> grad_input_type(const OpCall& op);
[[nodiscard]] std::vector<TensorType> grad_weight_type(const OpCall& op);

// Arithmetic.
[[nodiscard]] std::vector<graph::Work> forward_work(const OpView& op);
[[nodiscard]] std::vector<graph::Work> grad_input_work(const OpView& op);
[[nodiscard]] std::vector<graph::Work> grad_weight_work(const OpView& op);

}  // namespace popsim::ops
