// Convolutions of small images as matrix products.
//
// A row is a position of the output in one image, with the patch of the input
// that its kernel covers, in the order of the weight:
//   forward             patches @ weight^T
//   gradient of input   rows of the output @ weight, added up by position
//   gradient of weight  (rows of the output)^T @ patches
// If there are fewer rows than channels, the weight is the largest operand.
// These products read and write it where it is, but code in blocks (csrc/dense)
// spends most of its time on moving it.
#pragma once

#include <memory>

#include "dense/problem/convolution.h"

namespace popsim::ops {

// Returns null if the products would not be faster, or if they are not those of
// float32.
[[nodiscard]] std::unique_ptr<dense::Convolution> create_product_convolution(
    const dense::ConvolutionSpec& spec, dense::ConvolutionPass pass);

}  // namespace popsim::ops
