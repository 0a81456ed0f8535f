// Chooses the code that computes a convolution.
#pragma once

#include <memory>

#include "dense/problem/convolution.h"

namespace popsim::dense {

// Returns null if there is no fast code for the problem: without oneDNN, for
// empty tensors, and for sizes that do not fit together.
[[nodiscard]] std::unique_ptr<Convolution> create_convolution(
    const ConvolutionSpec& spec, ConvolutionPass pass);

}  // namespace popsim::dense
