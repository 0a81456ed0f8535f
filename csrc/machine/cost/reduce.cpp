// Reductions, norms, softmax and losses: compositions of reductions and passes
// over the elements, as PopART lowers them.
#include <cmath>
#include <string>
#include <vector>

#include "machine/cost/common.h"

namespace popsim::machine {
namespace {

using graph::kNoTensor;
using graph::TensorId;
using ops::OpView;

// `reductions` of the whole tensor to `results` numbers, and `passes` over it.
OpCost composed(CostContext& context, const OpView& op, TensorId id,
                int64_t results, int reductions, int passes) {
  OpCost cost;
  if (reductions > 0) {
    cost += times(reduction_of(context, op, id, results), reductions);
  }
  if (passes > 0) cost += times(tensor_pass(context, op, id, 3), passes);
  return cost;
}

// Passes over statistics of `results` numbers, spread over all tiles.
OpCost on_rows(const CostContext& context, int64_t results, double cycles,
               int passes) {
  const OpCost one =
      elementwise(ceil_div(results, context.tiles), pass(cycles, false));
  return times(one, passes);
}

OpCost reduce_cost(const OpView& op, CostContext& context) {
  const graph::Tensor& x = op.input(0);
  int64_t reduced = 1;
  for (const int64_t axis : op.attribute<std::vector<int64_t>>("axes")) {
    reduced *= x.shape[static_cast<size_t>(axis)];
  }
  const int64_t results = x.numel() / std::max<int64_t>(reduced, 1);
  return glued(reduction_of(context, op, op.input_id(0), results));
}

OpCost exponentials(CostContext& context, const OpView& op, TensorId id) {
  const bool half = is_half(op.graph().tensor(id).dtype);
  return elementwise(context.layouts.elements_per_tile(id),
                     *instruction_loop("exp", half, false));
}

OpCost cumsum_cost(const OpView& op, CostContext& context) {
  follow(context, op, op.input_id(0));
  return glued(assumed(composed(context, op, op.input_id(0), 1, 0, 2)));
}

// Two passes along the axis, one back, with products.
OpCost cumprod_grad_cost(const OpView& op, CostContext& context) {
  follow(context, op, op.input_id(1));
  return glued(assumed(composed(context, op, op.input_id(1), 1, 0, 4)));
}

OpCost logcumsumexp_cost(const OpView& op, CostContext& context) {
  const TensorId x = op.input_id(0);
  follow(context, op, x);
  OpCost cost = composed(context, op, x, 1, 0, 4);
  cost += times(exponentials(context, op, x), 3);
  return glued(assumed(cost));
}

// --- Norms ------------------------------------------------------------------

constexpr double kRowCycles = 20;  // of a pass over the statistics of rows

int64_t rows_of_layer_norm(const OpView& op, const graph::Tensor& x) {
  int64_t inner = 1;
  const auto axes = static_cast<size_t>(op.attribute<int64_t>("axes"));
  for (size_t i = 0; i < axes && i < x.shape.size(); ++i) {
    inner *= x.shape[x.shape.size() - 1 - i];
  }
  return x.numel() / std::max<int64_t>(inner, 1);
}

int64_t rows_of_group_norm(const OpView& op, const graph::Tensor& x) {
  const int64_t batch = x.shape.empty() ? 1 : x.shape[0];
  return batch * op.attribute<int64_t>("groups");
}

OpCost norm(const OpView& op, CostContext& context, TensorId x, int64_t rows) {
  follow(context, op, x);
  OpCost cost = composed(context, op, x, rows, 2, 3);
  cost += on_rows(context, rows, kRowCycles, 4);
  return glued(named(cost, "norm"));
}

OpCost norm_grad(const OpView& op, CostContext& context, TensorId x,
                 int64_t rows) {
  follow(context, op, op.input_id(0));
  OpCost cost = composed(context, op, x, rows, 4, 5);
  cost += on_rows(context, rows, kRowCycles, 4);
  return glued(named(cost, "norm"));
}

OpCost layer_norm_cost(const OpView& op, CostContext& context) {
  return norm(op, context, op.input_id(0), rows_of_layer_norm(op, op.input(0)));
}

OpCost layer_norm_grad_cost(const OpView& op, CostContext& context) {
  return norm_grad(op, context, op.input_id(1),
                   rows_of_layer_norm(op, op.input(1)));
}

OpCost group_norm_cost(const OpView& op, CostContext& context) {
  return norm(op, context, op.input_id(0), rows_of_group_norm(op, op.input(0)));
}

OpCost group_norm_grad_cost(const OpView& op, CostContext& context) {
  return norm_grad(op, context, op.input_id(1),
                   rows_of_group_norm(op, op.input(1)));
}

int64_t channels_of(const graph::Tensor& x) {
  return x.shape.size() < 2 ? x.numel() : x.shape[1];
}

// The passes that scale and shift follow as ops of their own.
OpCost batch_norm_statistics_cost(const OpView& op, CostContext& context) {
  OpCost cost =
      composed(context, op, op.input_id(0), channels_of(op.input(0)), 2, 0);
  return glued(named(cost, "norm"));
}

OpCost batch_norm_grad_cost(const OpView& op, CostContext& context) {
  OpCost cost =
      composed(context, op, op.input_id(1), channels_of(op.input(1)), 2, 0);
  return glued(named(cost, "norm"));
}

// --- Softmax and losses -----------------------------------------------------

int64_t rows_along(const OpView& op, const graph::Tensor& x) {
  const auto axis = static_cast<size_t>(op.attribute<int64_t>("axis"));
  const int64_t size = axis < x.shape.size() ? x.shape[axis] : 1;
  return x.numel() / std::max<int64_t>(size, 1);
}

OpCost softmax_cost(const OpView& op, CostContext& context) {
  const TensorId x = op.input_id(0);
  follow(context, op, x);
  const int64_t rows = rows_along(op, op.input(0));
  OpCost cost = composed(context, op, x, rows, 2, 2);
  cost += exponentials(context, op, x);
  if (op.attribute<bool>("log")) {
    cost += on_rows(context, rows, 12, 1);
    cost += tensor_pass(context, op, x, 3);
  }
  return glued(named(cost, "softmax"));
}

OpCost softmax_grad_cost(const OpView& op, CostContext& context) {
  const TensorId y = op.input_id(1);
  follow(context, op, y);
  OpCost cost = composed(context, op, y, rows_along(op, op.input(1)), 1, 3);
  return glued(named(cost, "softmax"));
}

// One number of each row, then their sum.
OpCost nll_loss_cost(const OpView& op, CostContext& context) {
  OpCost cost = tensor_pass(context, op, op.input_id(0), 5);
  cost += reduction_of(context, op, op.input_id(1), 1);
  return glued(named(assumed(cost), "loss"));
}

OpCost nll_loss_grad_cost(const OpView& op, CostContext& context) {
  return glued(
      named(assumed(tensor_pass(context, op, largest_tensor(op), 5)), "loss"));
}

OpCost cross_entropy_grad_cost(const OpView& op, CostContext& context) {
  const TensorId x = op.input_id(4);
  follow(context, op, x);
  OpCost cost = exponentials(context, op, x);
  cost += tensor_pass(context, op, x, 3);
  cost += tensor_pass(context, op, x, 5);
  return glued(named(assumed(cost), "loss"));
}

// Sums along the time, one step after the other, for each label and the blanks
// between them.
OpCost ctc_cost(const OpView& op, CostContext& context) {
  const graph::Tensor& x = op.input(op.op().kind == "ctc_loss" ? 0 : 1);
  const graph::Tensor& targets = op.input(op.op().kind == "ctc_loss" ? 1 : 2);
  const int64_t steps = x.shape.empty() ? 1 : x.shape[0];
  const int64_t states = 2 * targets.numel() + 1;
  const OpCost step =
      elementwise(ceil_div(states, context.tiles), pass(40, false));
  return glued(named(assumed(times(step, static_cast<double>(steps))), "loss"));
}

// --- Observation ------------------------------------------------------------

OpCost statistics_cost(const OpView& op, CostContext& context) {
  const TensorId x = op.input_id(0);
  OpCost cost;
  if (op.attribute<bool>("moments")) cost += composed(context, op, x, 1, 3, 0);
  if (op.attribute<bool>("counts")) cost += composed(context, op, x, 1, 1, 1);
  if (op.attribute<int64_t>("histogram") >= 0) {
    cost += composed(context, op, x, 1, 1, 4);
  }
  if (op.attribute<int64_t>("top") > 0) {
    cost += times(reduction_of(context, op, x, 1), 8);
  }
  if (op.attribute<bool>("fingerprint")) {
    cost += composed(context, op, x, 1, 1, 1);
  }
  if (const int64_t axis = op.attribute<int64_t>("channels"); axis >= 0) {
    cost += composed(context, op, x, channels_of(op.input(0)), 3, 1);
  }
  return glued(named(assumed(cost), "statistics"));
}

OpCost all_inputs_cost(const OpView& op, CostContext& context) {
  OpCost cost;
  for (const TensorId id : op.op().inputs) {
    if (id == kNoTensor || op.graph().tensor(id).numel() < 2) continue;
    cost += reduction_of(context, op, id, 1);
  }
  return glued(named(cost, "reduction"));
}

constexpr CostEntry kReductionCosts[] = {
    {"reduce", reduce_cost},
    {"cumsum", cumsum_cost},
    {"cumprod", cumsum_cost},
    {"cumprod_grad", cumprod_grad_cost},
    {"running_extreme", cumsum_cost},
    {"logcumsumexp", logcumsumexp_cost},
    {"layer_norm", layer_norm_cost},
    {"layer_norm_grad", layer_norm_grad_cost},
    {"group_norm", group_norm_cost},
    {"group_norm_grad", group_norm_grad_cost},
    {"batch_norm_statistics", batch_norm_statistics_cost},
    {"batch_norm_grad", batch_norm_grad_cost},
    {"softmax", softmax_cost},
    {"softmax_grad", softmax_grad_cost},
    {"nll_loss", nll_loss_cost},
    {"nll_loss_grad", nll_loss_grad_cost},
    {"cross_entropy_grad", cross_entropy_grad_cost},
    {"ctc_loss", ctc_cost},
    {"ctc_loss_grad", ctc_cost},
    {"statistics", statistics_cost},
    {"gradient_norm", all_inputs_cost},
    {"finite", all_inputs_cost},
};

}  // namespace

std::span<const CostEntry> reduction_costs() { return kReductionCosts; }

}  // namespace popsim::machine
