// What the rules of products share.
#pragma once

#include <string>

#include "machine/cost/common.h"
#include "machine/plans/matmul.h"

namespace popsim::machine {

// By the dtype of the operands, and the attribute `partials`.
[[nodiscard]] ProductTypes product_types(const ops::OpView& op, DType dtype);
[[nodiscard]] OpCost cost_of_plan(const MatmulPlan& plan);
// The result lies evenly on the tiles that compute it.
void place_result(CostContext& context, const graph::Tensor& result,
                  graph::TensorId id, int64_t tiles);
// Cycles to take one of `turns` slices of the weights, and with `sums` to add
// its result to those of the others.
[[nodiscard]] double slice_cycles(const MatmulProblem& problem, int64_t turns,
                                  int64_t tiles, bool sums,
                                  const MatmulPlan& plan);

}  // namespace popsim::machine
