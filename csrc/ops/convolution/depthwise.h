// The weight's gradient of a depthwise convolution: each channel has a kernel
// of its own. Vectors of channels are multiplied where they are, so images must
// have their channels last. (oneDNN does this for one image row at a time, and
// spends most of the time of small images on padding.)
#pragma once

#include <memory>

#include "dense/problem/convolution.h"

namespace popsim::ops {

// Whether the convolution is one for which images should have their channels
// last for this code: depthwise, and not large.
[[nodiscard]] bool moves_channels_last(const dense::ConvolutionSpec& spec,
                                       dense::ConvolutionPass pass);

// Returns null for other convolutions and passes.
[[nodiscard]] std::unique_ptr<dense::Convolution> create_depthwise_grad_weight(
    const dense::ConvolutionSpec& spec, dense::ConvolutionPass pass);

}  // namespace popsim::ops
