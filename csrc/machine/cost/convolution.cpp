// Convolutions and their gradients.
#include "machine/plans/convolution.h"

#include <string>
#include <vector>

#include "machine/cost/products.h"
#include "machine/formulas/rearrange.h"

namespace popsim::machine {
namespace {

using graph::Tensor;
using ops::OpView;

int64_t last_of(const std::vector<int64_t>& values) {
  return values.empty() ? 1 : values.back();
}

// The second to last, for images; 1 for sequences.
int64_t before_last(const std::vector<int64_t>& values) {
  return values.size() < 2 ? 1 : values[values.size() - 2];
}

// The sizes of the convolution that makes `wide` narrow: `weight_shape` is that
// of a convolution, not of a transposed one.
ConvolutionProblem window_of(const OpView& op, const Shape& narrow,
                             const Shape& weight_shape, DType dtype,
                             bool float_result) {
  ConvolutionProblem problem;
  problem.types = product_types(op, dtype);
  problem.float_result = float_result;
  problem.groups = op.attribute<int64_t>("groups");
  problem.out = weight_shape[0] / problem.groups;
  problem.in = weight_shape[1];
  problem.batch = narrow[0];
  for (size_t i = 2; i < narrow.size(); ++i) {
    (i + 1 < narrow.size() ? problem.rows : problem.columns) *= narrow[i];
  }
  for (size_t i = 2; i < weight_shape.size(); ++i) {
    (i + 1 < weight_shape.size() ? problem.kernel_rows
                                 : problem.kernel_columns) *= weight_shape[i];
  }
  problem.stride_rows = before_last(list_of(op, "stride"));
  problem.stride_columns = last_of(list_of(op, "stride"));
  return problem;
}

bool is_product(const ConvolutionProblem& problem) {
  return problem.kernel_rows * problem.kernel_columns == 1 &&
         problem.stride_rows * problem.stride_columns == 1 &&
         problem.groups == 1;
}

int64_t key_of_weight(const ConvolutionProblem& problem) {
  return problem.in * 1'000'003 + problem.out * 1'009 +
         problem.kernel_rows * problem.kernel_columns;
}

struct Found {
  OpCost cost;
  int64_t tiles = 1;
};

// Of each channel alone: no products of matrices.
Found depthwise(const ConvolutionProblem& problem, CostContext& context) {
  constexpr int64_t kWork = constants::kWorkers;
  const int64_t results = problem.batch * problem.rows * problem.columns *
                          problem.out * problem.groups;
  const int64_t tile = ceil_div(results, context.tiles);
  const int64_t vectors =
      ceil_div(ceil_div(tile, kWork), 8 / problem.types.size());
  const int64_t kernel = problem.kernel_rows * problem.kernel_columns;
  Found found;
  found.cost.compute = static_cast<double>(kWork * (30 + 2 * kernel * vectors));
  found.cost.exchange =
      static_cast<double>(tile * problem.types.size() * problem.stride_rows *
                          problem.stride_columns) /
      constants::kExchangeBytes;
  found.cost.sync = 2 * constants::kSync.value;
  found.cost.exchanges = true;
  found.cost.grade = Grade::kAssumed;
  found.cost.temporary_bytes = tile * problem.types.size() * 2;
  found.cost.formula = "convolution";
  found.tiles = std::min(results, context.tiles);
  return found;
}

Found as_product(const MatmulProblem& problem, CostContext& context) {
  const MatmulPlan plan =
      plan_matmul(context.device, context.tiles, context.proportion, problem);
  return {named(cost_of_plan(plan), "convolution"), plan.tiles()};
}

Found convolved(const ConvolutionProblem& problem, CostContext& context) {
  const int64_t field = problem.batch * problem.rows * problem.columns;
  if (is_product(problem)) {
    return as_product({problem.out, problem.in, field, 1, problem.types,
                       problem.float_result},
                      context);
  }
  if (problem.groups > 1 && problem.in == 1) return depthwise(problem, context);
  const ConvolutionPlan plan = plan_convolution(context.device, context.tiles,
                                                context.proportion, problem);
  Found found;
  found.cost.compute = plan.compute;
  found.cost.exchange = plan.exchange;
  found.cost.sync = plan.sync;
  found.cost.temporary_bytes = static_cast<int64_t>(plan.temporary_bytes);
  found.cost.exchanges = true;
  found.cost.formula = "convolution";
  found.cost.plan = to_string(plan);
  found.tiles = plan.tiles();
  return found;
}

double tile_share(const Tensor& tensor, const CostContext& context) {
  return static_cast<double>(
      ceil_div(tensor.numel() * device_size(tensor.dtype), context.tiles));
}

Found input_gradient(ConvolutionProblem problem, const Shape& wide,
                     CostContext& context, const Tensor& weight) {
  const double strides =
      static_cast<double>(problem.stride_rows * problem.stride_columns);
  std::swap(problem.in, problem.out);
  problem.rows = problem.columns = 1;
  for (size_t i = 2; i < wide.size(); ++i) {
    (i + 1 < wide.size() ? problem.rows : problem.columns) *= wide[i];
  }
  problem.stride_rows = problem.stride_columns = 1;
  Found found = convolved(problem, context);
  found.cost.compute /= strides;
  found.cost.exchange /= strides;
  found.cost +=
      rearrange_operand(tile_share(weight, context), device_size(weight.dtype));
  return found;
}

bool wide_result(const OpView& op, const Tensor& like) {
  return !is_half(op.has_output(0) ? op.output(0).dtype : like.dtype);
}

void place_output(const OpView& op, CostContext& context, int64_t tiles) {
  if (op.has_output(0)) {
    place_result(context, op.output(0), op.output_id(0), tiles);
  }
}

OpCost with_factor(OpCost cost) {
  cost.compute *= constants::kBackward.value;
  cost.exchange *= constants::kBackward.value;
  cost.sync *= constants::kBackward.value;
  cost.grade = worse(cost.grade, Grade::kFitted);
  return cost;
}

OpCost convolution_cost(const OpView& op, CostContext& context) {
  const Tensor& x = op.input(0);
  const Tensor& weight = op.input(1);
  const Tensor& y = op.has_output(0) ? op.output(0) : x;
  Found found;
  if (op.attribute<bool>("transposed")) {
    const auto problem =
        window_of(op, x.shape, weight.shape, x.dtype, wide_result(op, x));
    found = input_gradient(problem, y.shape, context, weight);
  } else {
    const auto problem =
        window_of(op, y.shape, weight.shape, x.dtype, wide_result(op, x));
    found = convolved(problem, context);
    context.layouts.place(
        op.input_id(1),
        context.layouts.even(weight.numel() * device_size(weight.dtype),
                             found.tiles, key_of_weight(problem)));
  }
  place_output(op, context, found.tiles);
  if (op.has_input(2) && op.has_output(0)) {
    found.cost += tensor_pass(context, op, op.output_id(0), 3);
  }
  return glued(found.cost);
}

OpCost convolution_grad_input_cost(const OpView& op, CostContext& context) {
  const Tensor& grad = op.input(0);
  const Tensor& weight = op.input(1);
  const auto& wide = list_of(op, "input_shape");
  Found found;
  if (op.attribute<bool>("transposed")) {
    found = convolved(
        window_of(op, wide, weight.shape, grad.dtype, wide_result(op, grad)),
        context);
  } else {
    found = input_gradient(window_of(op, grad.shape, weight.shape, grad.dtype,
                                     wide_result(op, grad)),
                           wide, context, weight);
  }
  place_output(op, context, found.tiles);
  return glued(with_factor(found.cost));
}

// A product over all positions of all images, after both operands are moved.
OpCost convolution_grad_weight_cost(const OpView& op, CostContext& context) {
  const bool transposed = op.attribute<bool>("transposed");
  const Tensor& narrow = op.input(transposed ? 1 : 0);
  const Tensor& wide = op.input(transposed ? 0 : 1);
  const ConvolutionProblem problem =
      window_of(op, narrow.shape, list_of(op, "weight_shape"), narrow.dtype,
                wide_result(op, narrow));
  const int64_t kernel = problem.kernel_rows * problem.kernel_columns;
  Found found = as_product(
      {problem.in * kernel, problem.batch * problem.rows * problem.columns,
       problem.out, problem.groups, problem.types, problem.float_result},
      context);
  for (const Tensor* operand : {&narrow, &wide}) {
    found.cost += rearrange_operand(tile_share(*operand, context),
                                    device_size(operand->dtype));
  }
  place_output(op, context, found.tiles);
  return glued(with_factor(found.cost));
}

constexpr CostEntry kConvolutionCosts[] = {
    {"convolution", convolution_cost},
    {"convolution_grad_input", convolution_grad_input_cost},
    {"convolution_grad_weight", convolution_grad_weight_cost},
};

}  // namespace

std::span<const CostEntry> convolution_costs() { return kConvolutionCosts; }

}  // namespace popsim::machine
