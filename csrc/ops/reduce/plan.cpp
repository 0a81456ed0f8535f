#include "ops/reduce/plan.h"

#include <algorithm>
#include <limits>

namespace popsim::ops {
namespace {

struct Axis {
  int64_t size;
  int64_t stride;
  int64_t out_stride;  // kept axes only
  bool reduced;
};

// Outermost first. Repeated elements come last of all to mind, so their axes
// are the outermost.
int64_t order_of(const Axis& axis) {
  return axis.stride == 0 ? std::numeric_limits<int64_t>::max() : axis.stride;
}

std::vector<Axis> axes_by_stride(const graph::Tensor& input,
                                 const std::vector<int64_t>& reduced) {
  std::vector<Axis> axes;
  int64_t out_stride = 1;
  for (size_t i = input.shape.size(); i-- > 0;) {
    const bool is_reduced = std::find(reduced.begin(), reduced.end(),
                                      static_cast<int64_t>(i)) != reduced.end();
    const int64_t size = input.shape[i];
    if (size != 1) {
      axes.push_back(
          {size, input.strides[i], is_reduced ? 0 : out_stride, is_reduced});
    }
    if (!is_reduced) out_stride *= size;
  }
  std::reverse(axes.begin(), axes.end());
  std::stable_sort(axes.begin(), axes.end(), [](const Axis& a, const Axis& b) {
    return order_of(a) > order_of(b);
  });
  return axes;
}

std::vector<Axis> merged(const std::vector<Axis>& axes) {
  std::vector<Axis> result;
  for (const Axis& axis : axes) {
    if (!result.empty()) {
      Axis& last = result.back();
      if (last.reduced == axis.reduced &&
          last.stride == axis.stride * axis.size &&
          last.out_stride == axis.out_stride * axis.size) {
        last = {last.size * axis.size, axis.stride, axis.out_stride,
                axis.reduced};
        continue;
      }
    }
    result.push_back(axis);
  }
  return result;
}

}  // namespace

ReducePlan plan_reduce(const graph::Tensor& input,
                       const std::vector<int64_t>& axes) {
  std::vector<Axis> order = merged(axes_by_stride(input, axes));
  if (order.empty()) order.push_back({1, 1, 0, true});
  const Axis inner = order.back();
  order.pop_back();
  Shape kept;
  Shape reduced;
  Strides kept_in;
  Strides kept_out;
  Strides reduced_in;
  for (const Axis& axis : order) {
    if (axis.reduced) {
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
          .keeps_width = !inner.reduced,
          .result_stride = inner.out_stride,
          .num_results = num_elements(kept),
          .rows_per_result = num_elements(reduced),
          .results_in = StridedWalk(kept, kept_in),
          .results_out = StridedWalk(kept, kept_out),
          .rows = StridedWalk(reduced, reduced_in),
          .dense_rows = dense_rows};
}

}  // namespace popsim::ops
