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
// The strides of a dense tensor [batch, channels, spatial axes...] whose
// channels lie last.
[[nodiscard]] Strides channels_last_strides(const Shape& shape);
// Dense, channels last, and not contiguous as well.
[[nodiscard]] bool is_channels_last(const Shape& shape, const Strides& strides);
// Whether no two elements have the same place in memory.
[[nodiscard]] bool is_injective(const Shape& shape, const Strides& strides);
// Whether a tensor that begins `offset` elements after the start of memory for
// `numel` elements stays inside of it. Never overflows.
[[nodiscard]] bool lies_within(const Shape& shape, const Strides& strides,
                               int64_t offset, int64_t numel);
// Sizes that are not negative, of no more elements than memory can have.
[[nodiscard]] bool is_valid_shape(const Shape& shape);
[[nodiscard]] std::string to_string(const Shape& shape);

}  // namespace popsim
