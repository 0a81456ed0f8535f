// Depthwise convolutions of volumes, and their gradients: each channel has a
// kernel of its own. Vectors of channels are multiplied where they are, so
// volumes must have their channels last. (oneDNN has fast code for images
// alone.)
#pragma once

#include <memory>

#include "dense/problem/convolution.h"

namespace popsim::ops {

// Whether the convolution is depthwise, has three spatial axes, and elements.
[[nodiscard]] bool is_depthwise_volume(const dense::ConvolutionSpec& spec);

// Returns null for other convolutions, and if channels are not last.
[[nodiscard]] std::unique_ptr<dense::Convolution> create_depthwise_volume(
    const dense::ConvolutionSpec& spec, dense::ConvolutionPass pass);

}  // namespace popsim::ops
