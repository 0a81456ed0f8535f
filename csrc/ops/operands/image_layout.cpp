#include "ops/operands/image_layout.h"

namespace popsim::ops {

Strides channels_last_strides(const Shape& shape) {
  Strides strides(shape.size());
  int64_t stride = shape[1];
  for (size_t axis = shape.size(); axis-- > 2;) {
    strides[axis] = stride;
    stride *= shape[axis];
  }
  strides[1] = 1;
  strides[0] = stride;
  return strides;
}

bool is_channels_last(const graph::Tensor& tensor) {
  if (tensor.shape.size() < 3 || tensor.contiguous()) return false;
  const Strides wanted = channels_last_strides(tensor.shape);
  for (size_t axis = 0; axis < wanted.size(); ++axis) {
    if (tensor.shape[axis] != 1 && tensor.strides[axis] != wanted[axis]) {
      return false;
    }
  }
  return true;
}

bool is_image(const graph::Tensor& tensor) {
  return tensor.contiguous() || is_channels_last(tensor);
}

}  // namespace popsim::ops
