#include "machine/cost/products.h"

namespace popsim::machine {

ProductTypes product_types(const ops::OpView& op, DType dtype) {
  ProductTypes types;
  types.half = is_half(dtype);
  types.half_partials = types.half && op.has_attribute("partials") &&
                        op.attribute<std::string>("partials") == "half";
  return types;
}

OpCost cost_of_plan(const MatmulPlan& plan) {
  const auto turns = static_cast<double>(plan.turns());
  OpCost cost;
  cost.exchange = turns * (plan.exchange_in + plan.exchange_weights +
                           plan.exchange_partials);
  cost.sync = plan.sync;
  cost.compute = plan.cycles - cost.exchange - cost.sync;
  cost.temporary_bytes = static_cast<int64_t>(plan.temporary_bytes);
  cost.exchanges = true;
  cost.formula = "product";
  cost.plan = to_string(plan);
  return cost;
}

void place_result(CostContext& context, const graph::Tensor& result,
                  graph::TensorId id, int64_t tiles) {
  const int64_t size = device_size(result.dtype);
  context.layouts.place(id, context.layouts.even(result.numel() * size, tiles,
                                                 result.numel() * 8 + size));
}

double slice_cycles(const MatmulProblem& problem, int64_t turns, int64_t tiles,
                    bool sums, const MatmulPlan& plan) {
  constexpr int64_t kW = constants::kWorkers;
  const int64_t weights =
      ceil_div(problem.k * problem.n * problem.groups, tiles);
  const int64_t vectors =
      ceil_div(ceil_div(weights, kW * turns), 8 / problem.types.size());
  auto cycles = static_cast<double>(kW * (63 + 2 * vectors));
  if (!sums) return cycles;
  const int64_t results = ceil_div(problem.m * problem.n * problem.groups,
                                   std::max<int64_t>(plan.tiles(), 1));
  const int64_t added =
      ceil_div(ceil_div(results, kW), 8 / problem.types.partial_size());
  return cycles + static_cast<double>(11 + kW * (58 + 3 * added));
}

}  // namespace popsim::machine
