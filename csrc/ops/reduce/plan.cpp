#include "ops/reduce/plan.h"

#include <algorithm>
#include <array>
#include <limits>

namespace popsim::ops {
namespace {

struct Axis {
  int64_t size;
  int64_t stride;
  int64_t out_stride;  // 0: the axis is reduced
};

// Strides of the contiguous result, 0 along reduced axes.
Strides result_strides(const Shape& shape,
                       const std::vector<int64_t>& reduced) {
  Strides strides(shape.size(), 0);
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    if (std::find(reduced.begin(), reduced.end(), static_cast<int64_t>(i)) !=
        reduced.end()) {
      continue;
    }
    strides[i] = stride;
    stride *= shape[i];
  }
  return strides;
}

// Merges axes and sorts them by their strides in the input. Reading the same
// element again costs nothing, so axes of stride 0 are the outermost ones.
std::vector<Axis> merged_axes(const graph::Tensor& input,
                              const std::vector<int64_t>& reduced) {
  Strides keys = input.strides;
  std::replace(keys.begin(), keys.end(), int64_t{0},
               std::numeric_limits<int64_t>::max());
  const MergedAxes merged = merge_axes(
      input.shape,
      std::array{input.strides, result_strides(input.shape, reduced)}, keys);
  std::vector<Axis> axes;
  for (size_t i = 0; i < merged.sizes.size(); ++i) {
    axes.push_back(
        {merged.sizes[i], merged.strides[0][i], merged.strides[1][i]});
  }
  if (axes.back().size == 1) axes.back().stride = 1;  // there is one element
  return axes;
}

}  // namespace

ReducePlan plan_reduce(const graph::Tensor& input,
                       const std::vector<int64_t>& axes) {
  std::vector<Axis> order = merged_axes(input, axes);
  const Axis inner = order.back();
  order.pop_back();
  Shape kept;
  Shape reduced;
  Strides kept_in;
  Strides kept_out;
  Strides reduced_in;
  for (const Axis& axis : order) {
    if (axis.out_stride == 0) {
      reduced.push_back(axis.size);
      reduced_in.push_back(axis.stride);
    } else {
      kept.push_back(axis.size);
      kept_in.push_back(axis.stride);
      kept_out.push_back(axis.out_stride);
    }
  }
  const bool dense_rows =
      inner.stride == 1 &&
      (reduced.empty() || (reduced.size() == 1 && reduced_in[0] == inner.size));
  return {.width = inner.size,
          .stride = inner.stride,
          .keeps_width = inner.out_stride != 0,
          .result_stride = inner.out_stride,
          .num_results = num_elements(kept),
          .rows_per_result = num_elements(reduced),
          .results_in = StridedWalk(kept, kept_in),
          .results_out = StridedWalk(kept, kept_out),
          .rows = StridedWalk(reduced, reduced_in),
          .dense_rows = dense_rows};
}

}  // namespace popsim::ops
