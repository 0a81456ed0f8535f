// Recurrent layers, and attention as one op.
#include <string>
#include <vector>

#include "machine/cost/products.h"
#include "machine/formulas/rearrange.h"

namespace popsim::machine {
namespace {

using graph::Tensor;
using ops::OpView;

// Sizes of a layer: the first axis of its input is the time.
struct Layer {
  int64_t steps = 1;
  int64_t batch = 1;
  int64_t in = 1;
  int64_t hidden = 1;
  int64_t gates = 1;
  ProductTypes types;
  bool half = false;
};

Layer layer_of(const OpView& op, const Tensor& x, const Tensor& weight) {
  const auto& mode = op.attribute<std::string>("mode");
  Layer layer;
  layer.steps = x.shape[0];
  layer.batch = x.shape[1];
  layer.in = x.shape[2];
  layer.gates = mode == "lstm" ? 4 : mode == "gru" ? 3 : 1;
  layer.hidden = weight.shape[0] / layer.gates;
  layer.types = product_types(op, x.dtype);
  layer.half = is_half(x.dtype);
  return layer;
}

// A step: one product of the input and the state, and the gates.
OpCost step_of(const Layer& layer, CostContext& context) {
  const MatmulPlan plan =
      plan_matmul(context.device, context.tiles, context.proportion,
                  {layer.batch, layer.in + layer.hidden,
                   layer.gates * layer.hidden, 1, layer.types, !layer.half});
  OpCost cost = cost_of_plan(plan);
  const int64_t values =
      ceil_div(layer.batch * layer.hidden * layer.gates, context.tiles);
  cost += elementwise(values, *instruction_loop("sigmoid", layer.half, false));
  cost += times(elementwise(values, pass(3, layer.half)), 2);
  return cost;
}

OpCost recurrent_cost(const OpView& op, CostContext& context) {
  const Layer layer = layer_of(op, op.input(0), op.input(3));
  OpCost cost =
      times(step_of(layer, context), static_cast<double>(layer.steps));
  return glued(named(cost, "recurrent"));
}

// Twice the steps, and one product over the sequence for the weights.
OpCost recurrent_grad_cost(const OpView& op, CostContext& context) {
  const Layer layer = layer_of(op, op.input(3), op.input(6));
  OpCost cost =
      times(step_of(layer, context), 2 * static_cast<double>(layer.steps));
  const MatmulPlan plan =
      plan_matmul(context.device, context.tiles, context.proportion,
                  {layer.in + layer.hidden, layer.batch * layer.steps,
                   layer.gates * layer.hidden, 1, layer.types, !layer.half});
  cost += cost_of_plan(plan);
  return glued(named(cost, "recurrent"));
}

// --- Attention --------------------------------------------------------------

OpCost moved(const Tensor& tensor, const CostContext& context) {
  const int64_t size = device_size(tensor.dtype);
  return rearrange_operand(
      static_cast<double>(ceil_div(tensor.numel() * size, context.tiles)),
      size);
}

// The scores of all queries and keys: the axes before the last two are groups.
OpCost attention_of(const Shape& shape, int64_t width, const Tensor& like,
                    CostContext& context, double products) {
  int64_t groups = 1;
  for (size_t i = 0; i + 2 < shape.size(); ++i) groups *= shape[i];
  const int64_t queries = shape.size() < 2 ? 1 : shape[shape.size() - 2];
  const int64_t keys = shape.empty() ? 1 : shape.back();
  const bool half = is_half(like.dtype);
  const ProductTypes types{half, false};
  OpCost cost;
  for (const MatmulProblem& problem :
       {MatmulProblem{queries, width, keys, groups, types, !half},
        MatmulProblem{queries, keys, width, groups, types, !half}}) {
    cost += times(cost_of_plan(plan_matmul(context.device, context.tiles,
                                           context.proportion, problem)),
                  products);
  }
  const int64_t scores = ceil_div(groups * queries * keys, context.tiles);
  cost += times(elementwise(scores, pass(3, half)), 4);
  cost += elementwise(scores, *instruction_loop("exp", half, false));
  cost += times(tensor_reduction({scores, context.tiles, groups * queries,
                                  half ? int64_t{2} : int64_t{4}}),
                2);
  return cost;
}

OpCost attention_cost(const OpView& op, CostContext& context) {
  const Tensor& q = op.input(0);
  OpCost cost =
      attention_of(list_of(op, "shape"), q.shape.back(), q, context, 1);
  for (const size_t i : {size_t{0}, size_t{1}, size_t{2}}) {
    cost += moved(op.input(i), context);
  }
  if (op.has_output(0)) cost += moved(op.output(0), context);
  return glued(named(cost, "attention"));
}

OpCost attention_grad_cost(const OpView& op, CostContext& context) {
  const Tensor* like = nullptr;
  OpCost moves;
  for (size_t i = 0; i < op.num_inputs(); ++i) {
    if (!op.has_input(i) || !is_floating(op.input(i).dtype)) continue;
    if (like == nullptr || i == 1) like = &op.input(i);
    if (i < 9) moves += moved(op.input(i), context);
  }
  if (like == nullptr) return glued(assumed(named({}, "attention")));
  OpCost cost =
      attention_of(list_of(op, "shape"), like->shape.back(), *like, context, 2);
  cost += moves;
  return glued(named(cost, "attention"));
}

constexpr CostEntry kRecurrentCosts[] = {
    {"recurrent", recurrent_cost},
    {"recurrent_grad", recurrent_grad_cost},
    {"attention", attention_cost},
    {"attention_grad", attention_grad_cost},
};

}  // namespace

std::span<const CostEntry> recurrent_costs() { return kRecurrentCosts; }

}  // namespace popsim::machine
