// Tensors [batch, channels, spatial axes...] that lie in memory with their
// channels last. Lowering gives them the strides; kernels ask here.
#pragma once

#include "base/shape.h"
#include "graph/graph.h"

namespace popsim::ops {

// Dense, channels last, and not contiguous as well.
[[nodiscard]] bool is_channels_last(const graph::Tensor& tensor);
// Contiguous or channels last: position i in memory is element i of some order.
[[nodiscard]] bool is_image(const graph::Tensor& tensor);

}  // namespace popsim::ops
