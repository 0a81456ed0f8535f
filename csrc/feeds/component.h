// The tensors of a queue's elements.
#pragma once

#include <cstdint>
#include <vector>

#include "base/dtype.h"
#include "base/shape.h"

namespace popsim::feeds {

// One tensor of each element.
struct Component {
  DType dtype = DType::kFloat32;
  Shape shape;

  [[nodiscard]] int64_t bytes() const {
    return num_elements(shape) * size_in_bytes(dtype);
  }
};

using Components = std::vector<Component>;

// The bytes of all tensors of an element.
[[nodiscard]] inline int64_t bytes_of(const Components& components) {
  int64_t bytes = 0;
  for (const Component& component : components) bytes += component.bytes();
  return bytes;
}

// The bytes of each tensor of an element.
[[nodiscard]] inline std::vector<int64_t> sizes_of(
    const Components& components) {
  std::vector<int64_t> sizes;
  for (const Component& component : components) {
    sizes.push_back(component.bytes());
  }
  return sizes;
}

}  // namespace popsim::feeds
