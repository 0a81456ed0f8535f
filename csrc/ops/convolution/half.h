// Convolutions and their gradients with half partials.
//
// They are products of patches of images with the weight, added up pass by pass
// as described in dense/vector/panels.h. A pass covers
//   forward             up to 16 adjacent input channels of the group at one
//                       position of the kernel
//   gradient of input   the same with output channels
//   gradient of weight  16 adjacent positions of the output, image by image
// In the first two, all positions of the kernel for one block of 16 channels
// come before the next block. Biases are added to the sum in float32; their
// gradients are float32 sums.
#pragma once

#include <memory>

#include "ops/convolution/roles.h"
#include "ops/op_def.h"

namespace popsim::ops {

// Returns null for tensors without elements.
[[nodiscard]] std::unique_ptr<Kernel> create_half_convolution(
    const OpView& op, const ConvolutionGeometry& geometry,
    const ConvolutionRoles& roles);

// The kernel for the weight's gradient. The tensors must have elements.
[[nodiscard]] std::unique_ptr<Kernel> create_half_weight_gradient(
    const OpView& op, const ConvolutionGeometry& geometry);

}  // namespace popsim::ops
