// The convolution ops, computed by ATen.
#pragma once

#include <memory>

#include "ops/convolution/geometry.h"

namespace popsim::ops {

[[nodiscard]] std::unique_ptr<Kernel> aten_forward(
    const OpView& op, const ConvolutionGeometry& geometry);
[[nodiscard]] std::unique_ptr<Kernel> aten_grad_input(
    const OpView& op, const ConvolutionGeometry& geometry);
[[nodiscard]] std::unique_ptr<Kernel> aten_grad_weight(
    const OpView& op, const ConvolutionGeometry& geometry);

}  // namespace popsim::ops
