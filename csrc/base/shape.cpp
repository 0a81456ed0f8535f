#include "base/shape.h"

#include <algorithm>
#include <numeric>

namespace popsim {

int64_t num_elements(const Shape& shape) {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  return count;
}

Strides contiguous_strides(const Shape& shape) {
  Strides strides(shape.size());
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= shape[i];
  }
  return strides;
}

bool is_contiguous(const Shape& shape, const Strides& strides) {
  int64_t expected = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    if (shape[i] != 1 && strides[i] != expected) return false;
    expected *= shape[i];
  }
  return true;
}

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

bool is_channels_last(const Shape& shape, const Strides& strides) {
  if (shape.size() < 3 || is_contiguous(shape, strides)) return false;
  const Strides wanted = channels_last_strides(shape);
  for (size_t axis = 0; axis < wanted.size(); ++axis) {
    if (shape[axis] != 1 && strides[axis] != wanted[axis]) return false;
  }
  return true;
}

bool is_injective(const Shape& shape, const Strides& strides) {
  if (num_elements(shape) == 0) return true;
  std::vector<size_t> axes(shape.size());
  std::iota(axes.begin(), axes.end(), size_t{0});
  std::ranges::sort(axes, {}, [&](size_t axis) { return strides[axis]; });
  int64_t reach = 0;  // distance from the first element to the last one so far
  for (const size_t axis : axes) {
    if (shape[axis] == 1) continue;
    if (strides[axis] <= reach) return false;
    reach += (shape[axis] - 1) * strides[axis];
  }
  return true;
}

bool lies_within(const Shape& shape, const Strides& strides, int64_t offset,
                 int64_t numel) {
  int64_t first = offset;
  int64_t last = offset;
  for (size_t i = 0; i < shape.size(); ++i) {
    if (shape[i] == 0) return offset >= 0 && offset <= numel;
    int64_t reach = 0;
    int64_t& end = strides[i] < 0 ? first : last;
    if (__builtin_mul_overflow(shape[i] - 1, strides[i], &reach) ||
        __builtin_add_overflow(end, reach, &end)) {
      return false;
    }
  }
  return first >= 0 && last < numel;
}

bool is_valid_shape(const Shape& shape) {
  constexpr int64_t kMost = int64_t{1} << 48;
  int64_t numel = 1;
  for (const int64_t size : shape) {
    if (size < 0 ||
        __builtin_mul_overflow(numel, std::max<int64_t>(size, 1), &numel) ||
        numel > kMost) {
      return false;
    }
  }
  return true;
}

std::string to_string(const Shape& shape) {
  std::string text = "(";
  for (size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(shape[i]);
  }
  return text + ")";
}

}  // namespace popsim
