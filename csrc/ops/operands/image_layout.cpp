#include "ops/operands/image_layout.h"

namespace popsim::ops {

bool is_channels_last(const graph::Tensor& tensor) {
  return popsim::is_channels_last(tensor.shape, tensor.strides);
}

bool is_image(const graph::Tensor& tensor) {
  return tensor.contiguous() || is_channels_last(tensor);
}

}  // namespace popsim::ops
