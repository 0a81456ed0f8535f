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
// The strides of a dense tensor [batch, channels, spatial axes...] with the
// channels last.
[[nodiscard]] Strides channels_last_strides(const Shape& shape);
// Dense and channels last, but not contiguous.
[[nodiscard]] bool is_channels_last(const Shape& shape, const Strides& strides);
// Whether every two elements have different places in memory.
[[nodiscard]] bool is_injective(const Shape& shape, const Strides& strides);
// Whether a tensor that begins `offset` elements after the start of a memory of
// `numel` elements stays inside that memory. Never overflows.
[[nodiscard]] bool lies_within(const Shape& shape, const Strides& strides,
                               int64_t offset, int64_t numel);
// Whether the sizes are not negative, and the number of elements is one that
// memory can hold.
[[nodiscard]] bool is_valid_shape(const Shape& shape);
[[nodiscard]] std::string to_string(const Shape& shape);

}  // namespace popsim
