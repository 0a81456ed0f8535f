// Shapes and strides, in elements.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace popsim {

using Shape = std::vector<int64_t>;
using Strides = std::vector<int64_t>;

[[nodiscard]] int64_t num_elements(const Shape& shape);
[[nodiscard]] Strides contiguous_strides(const Shape& shape);
// Dimensions of size 1 may have any stride.
[[nodiscard]] bool is_contiguous(const Shape& shape, const Strides& strides);
[[nodiscard]] std::string to_string(const Shape& shape);

}  // namespace popsim
