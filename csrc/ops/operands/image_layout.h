// Tensors [batch, channels, spatial axes...] with their channels last in
// memory. Lowering chooses these strides; kernels check for them here.
#pragma once

#include "base/shape.h"
#include "graph/graph.h"

namespace popsim::ops {

// Dense and channels last, but not contiguous.
[[nodiscard]] bool is_channels_last(const graph::Tensor& tensor);
// Contiguous or channels last: the elements fill the memory without gaps.
[[nodiscard]] bool is_image(const graph::Tensor& tensor);

}  // namespace popsim::ops
