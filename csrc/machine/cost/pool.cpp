// Pooling and interpolation. PopLibs, popnn/popnnCycleEstimators.
#include <string>
#include <vector>

#include "machine/cost/common.h"
#include "machine/formulas/rearrange.h"

namespace popsim::machine {
namespace {

using graph::Tensor;
using ops::OpView;

constexpr double kForward = 3;  // cycles of a vector at each position
constexpr double kMaximum = 5;  // of the gradient of a maximum

// The positions of a window; those of an adaptive pool cover the input.
int64_t positions_of(const OpView& op, const Tensor& wide,
                     const Tensor& narrow) {
  if (op.has_attribute("kernel")) {
    const auto& kernel = op.attribute<std::vector<int64_t>>("kernel");
    return kernel[0] * kernel[1];
  }
  return ceil_div(wide.numel(), std::max<int64_t>(narrow.numel(), 1));
}

// `results` are written, from `positions` each.
OpCost pooled(const CostContext& context, const Tensor& results,
              int64_t positions, double cycles, int64_t input_bytes) {
  constexpr int64_t kW = constants::kWorkers;
  const int64_t vector = 8 / device_size(results.dtype);
  const int64_t elements = ceil_div(results.numel(), context.tiles);
  const int64_t width = results.shape.empty() ? 1 : results.shape.back();
  const int64_t own = ceil_div(elements, kW);
  const int64_t rows = ceil_div(own, std::max<int64_t>(width, 1));
  OpCost cost;
  cost.compute = double{kW} * (25.0 * static_cast<double>(rows) +
                               cycles * static_cast<double>(positions) *
                                   static_cast<double>(ceil_div(own, vector)));
  cost.sync = constants::kSync.value;
  cost.formula = "pool";
  cost += move(static_cast<double>(ceil_div(input_bytes, context.tiles)));
  return glued(cost);
}

int64_t bytes_of(const Tensor& tensor) {
  return tensor.numel() * device_size(tensor.dtype);
}

OpCost pool_cost(const OpView& op, CostContext& context) {
  const Tensor& x = op.input(0);
  const Tensor& y = op.has_output(0) ? op.output(0) : x;
  return pooled(context, y, positions_of(op, x, y), kForward, bytes_of(x));
}

OpCost average_pool_grad_cost(const OpView& op, CostContext& context) {
  const Tensor& y = op.input(0);
  const Tensor& x = op.has_output(0) ? op.output(0) : y;
  // Each element has a part of as many windows as the windows have positions,
  // divided by how many elements there are for a window.
  const int64_t positions = positions_of(op, x, y);
  const int64_t shared =
      ceil_div(positions * y.numel(), std::max<int64_t>(x.numel(), 1));
  return pooled(context, x, std::max<int64_t>(shared, 1), kForward,
                bytes_of(y));
}

OpCost max_pool_grad_cost(const OpView& op, CostContext& context) {
  const Tensor& y = op.input(0);
  const Tensor& x = op.has_output(0) ? op.output(0) : y;
  const auto& kernel = op.attribute<std::vector<int64_t>>("kernel");
  const int64_t shared = ceil_div(kernel[0] * kernel[1] * y.numel(),
                                  std::max<int64_t>(x.numel(), 1));
  return pooled(context, x, std::max<int64_t>(shared, 1), kMaximum,
                bytes_of(y));
}

// Each result is computed from the same number of positions; with antialiasing
// from those that it covers, too.
OpCost resample_cost(const OpView& op, CostContext& context) {
  const Tensor& x = op.input(0);
  const Tensor& y = op.has_output(0) ? op.output(0) : x;
  const auto& mode = op.attribute<std::string>("mode");
  const int64_t along = mode == "linear" ? 2 : mode == "cubic" ? 4 : 1;
  int64_t positions = 1;
  for (size_t axis = 2; axis < x.shape.size(); ++axis) positions *= along;
  const bool is_gradient = op.op().kind == "resample_grad";
  const Tensor& wide = is_gradient ? x : y;
  const Tensor& narrow = is_gradient ? y : x;
  const int64_t ratio =
      ceil_div(wide.numel(), std::max<int64_t>(narrow.numel(), 1));
  const int64_t covered =
      ceil_div(narrow.numel(), std::max<int64_t>(wide.numel(), 1));
  if (op.attribute<bool>("antialias")) positions *= covered;
  if (is_gradient) positions *= ratio;
  return assumed(named(pooled(context, y, positions, kForward, bytes_of(x)),
                       "interpolation"));
}

constexpr CostEntry kPoolCosts[] = {
    {"average_pool", pool_cost}, {"average_pool_grad", average_pool_grad_cost},
    {"max_pool", pool_cost},     {"max_pool_grad", max_pool_grad_cost},
    {"resample", resample_cost}, {"resample_grad", resample_cost},
};

}  // namespace

std::span<const CostEntry> pool_costs() { return kPoolCosts; }

}  // namespace popsim::machine
