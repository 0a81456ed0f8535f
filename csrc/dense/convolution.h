// Which code computes a convolution.
#pragma once

#include <memory>

#include "dense/problem/convolution.h"

namespace popsim::dense {

// Null when there is no fast code for the problem: without oneDNN, for empty
// tensors, and for sizes that do not follow from each other.
[[nodiscard]] std::unique_ptr<Convolution> create_convolution(
    const ConvolutionSpec& spec, ConvolutionPass pass);

}  // namespace popsim::dense
