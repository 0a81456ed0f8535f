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
constexpr double kAdam = 40;
constexpr double kRmsprop = 30;
constexpr double kMul = 3;

// Passes over the weights of one op: y += a * x, or as many cycles. PopLibs
// fuses the updates of a group: they have no control code of their own.
OpCost passes(CostContext& context, const OpView& op, TensorId weight,
              double cycles, int count) {
  const bool half = is_half(op.graph().tensor(weight).dtype);
  VectorLoop loop = pass(cycles, half);
  loop.overhead = 30;
  OpCost cost = times(
      elementwise(context.layouts.elements_per_tile(weight), loop), count);
  follow(context, op, weight);
  return named(cost, "update");
}

// The passes over each of several parameters of one op.
template <typename Rule>
OpCost each_parameter(const OpView& op, Rule&& rule) {
  const int64_t count = op.attribute<int64_t>("parameters");
  const auto stride = static_cast<size_t>(std::ssize(op.op().inputs) / count);
  OpCost sum;
  for (int64_t i = 0; i < count; ++i) {
    const TensorId weight = op.op().inputs[static_cast<size_t>(i) * stride];
    if (weight != kNoTensor) sum += rule(weight);
  }
  return sum;
}

// A gradient with another layout than its accumulator is moved first.
OpCost accumulate_cost(const OpView& op, CostContext& context) {
  const TensorId accumulator = op.input_id(1);
  OpCost cost =
      bring(context, op, op.input_id(0), context.layouts.of(accumulator));
  cost += passes(context, op, accumulator, kAxpy, 1);
  return glued(named(cost, "accumulation"));
}

template <int kCount>
OpCost sgd_cost(const OpView& op, CostContext& context) {
  return passes(context, op, op.input_id(0), kAxpy, kCount);
}

template <int kCount>
OpCost momentum_cost(const OpView& op, CostContext& context) {
  return each_parameter(op, [&](TensorId weight) {
    return passes(context, op, weight, kAxpy, kCount);
  });
}

OpCost adam_cost(const OpView& op, CostContext& context) {
  return assumed(each_parameter(op, [&](TensorId weight) {
    return passes(context, op, weight, kAdam, 1);
  }));
}

OpCost lamb_cost(const OpView& op, CostContext& context) {
  return assumed(each_parameter(op, [&](TensorId weight) {
    OpCost cost = passes(context, op, weight, kAdam, 1);
    cost += times(reduction_of(context, op, weight, 1), 2);
    cost += passes(context, op, weight, kMul, 2);
    return named(cost, "update");
  }));
}

OpCost rmsprop_cost(const OpView& op, CostContext& context) {
  return assumed(each_parameter(op, [&](TensorId weight) {
    return passes(context, op, weight, kRmsprop, 1);
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
    {"sgd_combined_accumulate", sgd_cost<1>},
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
