// Matrix products.
#include <string>
#include <string_view>

#include "machine/cost/common.h"
#include "machine/cost/products.h"
#include "machine/formulas/rearrange.h"

namespace popsim::machine {
namespace {

using graph::Tensor;
using graph::TensorId;
using ops::OpView;

// The part of a layout's id that products of equal sizes share.
int64_t key_of(const MatmulProblem& problem, int64_t role) {
  return ((problem.m * 1'000'003 + problem.k) * 1'000'003 + problem.n) * 7 +
         problem.groups * 31 + role;
}

MatmulProblem problem_of(const OpView& op) {
  const Tensor& a = op.input(0);
  const Tensor& b = op.input(1);
  const size_t rank = a.shape.size();
  MatmulProblem problem;
  problem.m = rank < 2 ? 1 : a.shape[rank - 2];
  problem.k = a.shape.empty() ? 1 : a.shape.back();
  problem.n = b.shape.size() < 2 ? 1 : b.shape.back();
  for (size_t i = 0; i + 2 < rank; ++i) problem.groups *= a.shape[i];
  problem.types = product_types(op, a.dtype);
  const DType result = op.has_output(0) ? op.output(0).dtype : a.dtype;
  problem.float_result = !is_half(result);
  return problem;
}

// Weights are stored where the product needs them.
bool is_stored(const OpView& op, TensorId id) {
  const auto kind = op.graph().tensor(op.graph().root(id)).kind;
  return kind == graph::TensorKind::kVariable ||
         kind == graph::TensorKind::kConstant;
}

void place_operands(const OpView& op, CostContext& context,
                    const MatmulProblem& problem, const MatmulPlan& plan) {
  for (const size_t i : {size_t{0}, size_t{1}}) {
    const TensorId id = op.input_id(i);
    if (!is_stored(op, id)) continue;
    const Tensor& owner = op.graph().tensor(op.graph().root(id));
    context.layouts.place(
        id, context.layouts.even(owner.numel() * device_size(owner.dtype),
                                 plan.tiles(),
                                 key_of(problem, static_cast<int64_t>(i))));
  }
  if (op.has_output(0))
    place_result(context, op.output(0), op.output_id(0), plan.tiles());
}

// The name of a forward op that the backward pass runs again ends so
// (popsim_torch/ir/names.py, `rebuilt`).
constexpr std::string_view kRecomputed = "__re";

// The products of the backward pass find their operands as other plans left
// them: weights, activations and gradients are rearranged.
OpCost operand_moves(const OpView& op, CostContext& context) {
  OpCost cost;
  if (op.op().phase != graph::Phase::kBackward ||
      op.op().name.ends_with(kRecomputed)) {
    return cost;
  }
  for (const size_t i : {size_t{0}, size_t{1}}) {
    const Tensor& tensor = op.input(i);
    const int64_t bytes = tensor.numel() * device_size(tensor.dtype);
    cost +=
        rearrange_operand(static_cast<double>(ceil_div(bytes, context.tiles)),
                          device_size(tensor.dtype));
  }
  return cost;
}

OpCost after_product(const OpView& op, CostContext& context) {
  OpCost cost;
  if (!op.has_output(0)) return cost;
  const TensorId output = op.output_id(0);
  if (op.has_input(2)) cost += tensor_pass(context, op, output, 3);
  if (op.has_attribute("activation")) {
    cost += tensor_pass(context, op, output, 3);
  }
  if (op.has_input(3)) cost += tensor_pass(context, op, output, 3);
  return cost;
}

OpCost matmul_cost(const OpView& op, CostContext& context) {
  const MatmulProblem problem = problem_of(op);
  const MatmulPlan plan =
      plan_matmul(context.device, context.tiles, context.proportion, problem);
  place_operands(op, context, problem, plan);
  OpCost cost = cost_of_plan(plan);
  cost += operand_moves(op, context);
  cost += after_product(op, context);
  return glued(cost);
}

OpCost serialized_matmul_cost(const OpView& op, CostContext& context) {
  MatmulProblem problem = problem_of(op);
  const int64_t factor = op.attribute<int64_t>("factor");
  const auto& slices = op.attribute<std::string>("slices");
  int64_t& divided = slices == "rows"      ? problem.m
                     : slices == "columns" ? problem.n
                                           : problem.k;
  divided = ceil_div(divided, factor);
  const MatmulPlan plan =
      plan_matmul(context.device, context.tiles, context.proportion, problem);
  place_operands(op, context, problem, plan);
  OpCost cost = cost_of_plan(plan);
  cost.compute +=
      slice_cycles(problem, factor, context.tiles, slices == "depth", plan);
  cost *= static_cast<double>(factor);
  cost += operand_moves(op, context);
  return glued(cost);
}

// A product whose result goes straight into the weight.
OpCost product_update_cost(const OpView& op, CostContext& context) {
  const Tensor& a = op.input(1);
  const Tensor& b = op.input(2);
  MatmulProblem problem{a.shape[0], a.shape[1], b.shape[1], 1, {}, true};
  const MatmulPlan plan =
      plan_matmul(context.device, context.tiles, context.proportion, problem);
  OpCost cost = cost_of_plan(plan);
  cost += tensor_pass(context, op, op.input_id(0), 3);
  return glued(cost);
}

constexpr CostEntry kMatmulCosts[] = {
    {"matmul", matmul_cost},
    {"serialized_matmul", serialized_matmul_cost},
    {"sgd_product_update", product_update_cost},
};

}  // namespace

std::span<const CostEntry> matmul_costs() { return kMatmulCosts; }

}  // namespace popsim::machine
