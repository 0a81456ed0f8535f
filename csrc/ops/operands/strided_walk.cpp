#include "ops/operands/strided_walk.h"

#include <numeric>
#include <utility>

#include "base/check.h"

namespace popsim::ops {

Strides broadcast_strides(const Shape& shape, const Strides& strides,
                          const Shape& wanted) {
  check_internal(shape.size() <= wanted.size(), "shape ", to_string(shape),
                 " does not broadcast to ", to_string(wanted));
  Strides result(wanted.size(), 0);
  const size_t missing = wanted.size() - shape.size();
  for (size_t i = 0; i < shape.size(); ++i) {
    if (shape[i] == 1) continue;
    check_internal(shape[i] == wanted[missing + i], "shape ", to_string(shape),
                   " does not broadcast to ", to_string(wanted));
    result[missing + i] = strides[i];
  }
  return result;
}

MergedAxes merge_axes(const Shape& shape, std::span<const Strides> strides) {
  MergedAxes axes;
  axes.strides.resize(strides.size());
  const auto merges_into_last = [&](size_t axis) {
    for (size_t s = 0; s < strides.size(); ++s) {
      if (axes.strides[s].back() != strides[s][axis] * shape[axis])
        return false;
    }
    return true;
  };
  for (size_t axis = 0; axis < shape.size(); ++axis) {
    if (shape[axis] == 1) continue;
    const bool merge = !axes.sizes.empty() && merges_into_last(axis);
    if (merge) {
      axes.sizes.back() *= shape[axis];
    } else {
      axes.sizes.push_back(shape[axis]);
    }
    for (size_t s = 0; s < strides.size(); ++s) {
      if (merge) axes.strides[s].pop_back();
      axes.strides[s].push_back(strides[s][axis]);
    }
  }
  if (axes.sizes.empty()) {
    axes.sizes.push_back(1);
    for (Strides& set : axes.strides) set.push_back(0);
  }
  return axes;
}

MergedAxes merge_axes(const Shape& shape, std::span<const Strides> strides,
                      const Strides& keys) {
  std::vector<size_t> order(shape.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return keys[a] > keys[b]; });
  const auto in_order = [&](const auto& values) {
    std::vector<int64_t> sorted;
    for (const size_t axis : order) sorted.push_back(values[axis]);
    return sorted;
  };
  std::vector<Strides> sorted;
  for (const Strides& set : strides) sorted.push_back(in_order(set));
  return merge_axes(in_order(shape), sorted);
}

StridedWalk::StridedWalk(const Shape& shape, const Strides& strides) {
  const MergedAxes axes = merge_axes(shape, std::span(&strides, 1));
  num_outer_ = axes.sizes.size() - 1;
  check_internal(num_outer_ <= kMaxAxes, "shape ", to_string(shape),
                 " has more axes than a strided walk supports");
  size_ = std::max<int64_t>(axes.sizes.back(), 1);
  stride_ = axes.strides[0].back();
  for (size_t i = 0; i < num_outer_; ++i) {
    outer_sizes_[i] = axes.sizes[i];
    outer_strides_[i] = axes.strides[0][i];
  }
}

int64_t StridedWalk::offset_of(int64_t index) const {
  if (num_outer_ == 0) return index * stride_;
  Counters counters;
  return start(index / size_, counters) + (index % size_) * stride_;
}

int64_t StridedWalk::start(int64_t row, Counters& counters) const {
  int64_t offset = 0;
  for (size_t i = num_outer_; i-- > 0;) {
    counters[i] = row % outer_sizes_[i];
    row /= outer_sizes_[i];
    offset += counters[i] * outer_strides_[i];
  }
  return offset;
}

void StridedWalk::advance(Counters& counters, int64_t& offset) const {
  for (size_t i = num_outer_; i-- > 0;) {
    offset += outer_strides_[i];
    if (++counters[i] < outer_sizes_[i]) return;
    offset -= outer_sizes_[i] * outer_strides_[i];
    counters[i] = 0;
  }
}

}  // namespace popsim::ops
