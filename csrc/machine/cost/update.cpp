// Updates of weights, and the accumulation of gradients.
#include <string_view>

#include "machine/cost/common.h"

namespace popsim::machine {
namespace {

using graph::kNoTensor;
using graph::TensorId;
using ops::OpView;

// Cycles for a vector of 8 bytes of float32, in all passes together.
constexpr double kAxpy = 3;
constexpr double kMixedAxpy = 5;  // of both sizes: for four numbers
constexpr double kAdam = 40;
constexpr double kRmsprop = 30;
constexpr double kMul = 3;

// Whether a weight and all that is updated with it have 16 bits: its gradient
// and its states, which have its shape.
bool is_half_update(const OpView& op, size_t first, size_t stride) {
  const graph::Tensor& weight = op.graph().tensor(op.op().inputs[first]);
  for (size_t i = first; i < first + stride; ++i) {
    const TensorId id = op.op().inputs[i];
    if (id == kNoTensor || op.graph().tensor(id).shape != weight.shape)
      continue;
    // Numbers that are settings have the shape of weights that are numbers.
    if (weight.numel() > 1 && !is_half(op.graph().tensor(id).dtype)) {
      return false;
    }
  }
  return is_half(weight.dtype);
}

// Passes over the weights of one op: y += a * x, or as many cycles. PopLibs
// fuses the updates of a group: they have no control code of their own.
OpCost passes(CostContext& context, TensorId weight, bool half, double cycles,
              int count) {
  VectorLoop loop = pass(cycles, half);
  loop.overhead = 30;
  OpCost cost = times(
      elementwise(context.layouts.elements_per_tile(weight), loop), count);
  return named(cost, "update");
}

// A gradient that no accumulator keeps lies as the backward pass left it: it is
// moved to its weight. Accumulators and states lie as their weights.
OpCost gradient_move(CostContext& context, const OpView& op, TensorId gradient,
                     TensorId weight) {
  if (gradient == kNoTensor) return {};
  const auto kind = op.graph().tensor(op.graph().root(gradient)).kind;
  if (kind != graph::TensorKind::kValue) return {};
  return bring(context, op, gradient, context.layouts.of(weight));
}

// The updates of each of several parameters of one op: first its weight, then
// its gradient, then the rest.
template <typename Rule>
OpCost each_parameter(const OpView& op, CostContext& context, int64_t count,
                      Rule&& rule) {
  const auto stride = static_cast<size_t>(std::ssize(op.op().inputs) / count);
  OpCost sum;
  for (size_t i = 0; i < op.op().inputs.size(); i += stride) {
    const TensorId weight = op.op().inputs[i];
    if (weight == kNoTensor) continue;
    sum += gradient_move(context, op, op.op().inputs[i + 1], weight);
    sum += rule(weight, is_half_update(op, i, stride));
  }
  return named(sum, "update");
}

// A gradient with another layout than its accumulator is moved first.
OpCost accumulate_cost(const OpView& op, CostContext& context) {
  const TensorId accumulator = op.input_id(1);
  const Layout layout = context.layouts.of(accumulator);
  OpCost cost = bring(context, op, op.input_id(0), layout);
  const bool half = is_half(op.input(1).dtype);
  if (half == is_half(op.input(0).dtype)) {
    cost += passes(context, accumulator, half, kAxpy, 1);
  } else {
    cost += passes(context, accumulator, true, kMixedAxpy, 1);
  }
  return glued(named(cost, "accumulation"));
}

template <int kCount>
OpCost sgd_cost(const OpView& op, CostContext& context) {
  return each_parameter(op, context, 1, [&](TensorId weight, bool half) {
    return passes(context, weight, half, kAxpy, kCount);
  });
}

template <int kCount>
OpCost momentum_cost(const OpView& op, CostContext& context) {
  const int64_t count = op.attribute<int64_t>("parameters");
  return each_parameter(op, context, count, [&](TensorId weight, bool half) {
    return passes(context, weight, half, kAxpy, kCount);
  });
}

OpCost adam_cost(const OpView& op, CostContext& context) {
  const int64_t count = op.attribute<int64_t>("parameters");
  return assumed(
      each_parameter(op, context, count, [&](TensorId weight, bool half) {
        return passes(context, weight, half, kAdam, 1);
      }));
}

OpCost lamb_cost(const OpView& op, CostContext& context) {
  const int64_t count = op.attribute<int64_t>("parameters");
  return assumed(
      each_parameter(op, context, count, [&](TensorId weight, bool half) {
        OpCost cost = passes(context, weight, half, kAdam, 1);
        cost += times(reduction_of(context, op, weight, 1), 2);
        cost += passes(context, weight, half, kMul, 2);
        return cost;
      }));
}

OpCost rmsprop_cost(const OpView& op, CostContext& context) {
  const int64_t count = op.attribute<int64_t>("parameters");
  return assumed(
      each_parameter(op, context, count, [&](TensorId weight, bool half) {
        return passes(context, weight, half, kRmsprop, 1);
      }));
}

// The time on the links is that of the program, not of one op.
OpCost all_reduce_cost(const OpView& /*op*/, CostContext& /*context*/) {
  OpCost cost;
  cost.grade = Grade::kFitted;
  cost.formula = "all-reduce";
  return cost;
}

constexpr CostEntry kUpdateCosts[] = {
    {"accumulate", accumulate_cost},
    {"sgd_update", sgd_cost<1>},
    {"sgd_combined_accumulate", accumulate_cost},
    {"sgd_combined_update", momentum_cost<2>},
    {"sgd_momentum_update", momentum_cost<3>},
    {"adam_update", adam_cost},
    {"lamb_update", lamb_cost},
    {"rmsprop_update", rmsprop_cost},
    {"all_reduce", all_reduce_cost},
};

}  // namespace

std::span<const CostEntry> update_costs() { return kUpdateCosts; }

}  // namespace popsim::machine
