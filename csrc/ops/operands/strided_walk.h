// Visits the elements of a strided tensor in row-major order, run by run.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "base/shape.h"

namespace popsim::ops {

// Strides that give a tensor the shape `wanted`: 0 along broadcast axes. Throws
// InternalError if `shape` does not broadcast to `wanted`.
[[nodiscard]] Strides broadcast_strides(const Shape& shape,
                                        const Strides& strides,
                                        const Shape& wanted);

// The axes of one shape with several sets of strides; neighbouring axes are
// merged if every set allows it.
struct MergedAxes {
  Shape sizes;  // at least one axis; only a single axis may have size 1
  std::vector<Strides> strides;  // one per set, as long as `sizes`
};
[[nodiscard]] MergedAxes merge_axes(const Shape& shape,
                                    std::span<const Strides> strides);
// The same, with the axes in the order of their keys: the axis with the largest
// key is the outermost.
[[nodiscard]] MergedAxes merge_axes(const Shape& shape,
                                    std::span<const Strides> strides,
                                    const Strides& keys);

class StridedWalk {
 public:
  StridedWalk(const Shape& shape, const Strides& strides);

  // Calls visit(offset, stride, count) for the elements [first, first + count)
  // in row-major order; offset and stride are in elements.
  template <typename Visit>
  void for_each_run(int64_t first, int64_t count, Visit&& visit) const;
  // Offset of the element with the row-major position `index`.
  [[nodiscard]] int64_t offset_of(int64_t index) const;

  [[nodiscard]] bool uniform() const { return num_outer_ == 0 && stride_ == 0; }
  [[nodiscard]] bool contiguous() const {
    return num_outer_ == 0 && stride_ == 1;
  }

 private:
  static constexpr size_t kMaxAxes = 16;
  using Counters = std::array<int64_t, kMaxAxes>;

  int64_t start(int64_t row, Counters& counters) const;
  void advance(Counters& counters, int64_t& offset) const;

  int64_t size_ = 1;  // of the innermost axis
  int64_t stride_ = 0;
  size_t num_outer_ = 0;
  Counters outer_sizes_{};  // outermost axis first
  Counters outer_strides_{};
};

template <typename Visit>
void StridedWalk::for_each_run(int64_t first, int64_t count,
                               Visit&& visit) const {
  int64_t column = first % size_;
  Counters counters;
  int64_t offset = start(first / size_, counters);
  while (count > 0) {
    const int64_t length = std::min(count, size_ - column);
    visit(offset + column * stride_, stride_, length);
    count -= length;
    column = 0;
    if (count > 0) advance(counters, offset);
  }
}

}  // namespace popsim::ops
