// Operators of ATen by their names, searches, and what runs on the host.
#include <array>
#include <cmath>
#include <string>
#include <string_view>

#include "machine/cost/common.h"
#include "machine/formulas/lookup.h"

namespace popsim::machine {
namespace {

using graph::kNoTensor;
using graph::Tensor;
using graph::TensorId;
using ops::OpView;

constexpr std::array<std::string_view, 8> kSorts = {
    "sort", "argsort", "topk", "kthvalue", "median", "unique", "mode", "histc"};
constexpr std::array<std::string_view, 10> kFills = {
    "arange", "zeros", "ones",       "full",      "empty",
    "eye",    "fill",  "zeros_like", "ones_like", "full_like"};
constexpr std::array<std::string_view, 9> kLookups = {
    "index",     "index_select", "gather",      "take",          "scatter",
    "index_put", "index_add",    "scatter_add", "scatter_reduce"};
constexpr std::array<std::string_view, 12> kReductions = {
    "sum",  "mean", "max",  "min", "argmax", "argmin",
    "amax", "amin", "prod", "var", "std",    "norm"};
constexpr double kArgument = 3;  // reductions that an arg-max takes

template <size_t kCount>
bool has_name(const std::array<std::string_view, kCount>& names,
              std::string_view name) {
  return std::ranges::any_of(names, [&](std::string_view known) {
    return name == known || (name.starts_with(known) && name.ends_with('_') &&
                             name.size() == known.size() + 1);
  });
}

OpCost sorted(const CostContext& context, const Tensor& x) {
  const int64_t axis = x.shape.empty() ? 1 : x.shape.back();
  const int64_t own =
      ceil_div(ceil_div(x.numel(), context.tiles), constants::kWorkers);
  OpCost cost;
  cost.compute = static_cast<double>(constants::kWorkers * own * 20) *
                 std::log2(static_cast<double>(std::max<int64_t>(axis, 2)));
  cost.sync = constants::kSync.value;
  cost.formula = "sort";
  return cost;
}

OpCost looked_up(const CostContext& context, const OpView& op,
                 const Tensor& x) {
  const Tensor& y = op.has_output(0) ? op.output(0) : x;
  const int64_t rows = x.shape.empty() ? 1 : x.shape[0];
  const int64_t width = x.numel() / std::max<int64_t>(rows, 1);
  const int64_t indices = ceil_div(y.numel(), std::max<int64_t>(width, 1));
  return plan_lookup(context.tiles,
                     {rows, width, indices, device_size(x.dtype), false})
      .cost;
}

// A composition of formulas where the name of the operator is known, else a
// pass over the largest tensor.
OpCost aten_cost(const OpView& op, CostContext& context) {
  const TensorId largest = largest_tensor(op);
  if (largest == kNoTensor) return glued(assumed(named({}, "ATen operator")));
  std::string name = op.attribute<std::string>("operator");
  name = name.substr(name.rfind(':') + 1);
  const Tensor& x = op.graph().tensor(largest);
  OpCost cost;
  if (has_name(kSorts, name)) {
    cost = sorted(context, x);
  } else if (has_name(kFills, name)) {
    cost = fill(context.layouts.elements_per_tile(largest), is_half(x.dtype));
  } else if (has_name(kLookups, name)) {
    cost = looked_up(context, op, x);
  } else if (has_name(kReductions, name)) {
    const int64_t results = op.has_output(0) ? op.output(0).numel() : 1;
    cost = reduction_of(context, op, largest, results);
    if (name.starts_with("arg")) cost *= kArgument;
  } else {
    follow(context, op, largest);
    cost = tensor_pass(context, op, largest, 3);
  }
  return glued(assumed(named(cost, "ATen operator")));
}

OpCost scatter_cost(const OpView& op, CostContext& context) {
  return glued(assumed(named(looked_up(context, op, op.input(2)), "lookup")));
}

OpCost take_cost(const OpView& op, CostContext& context) {
  return glued(assumed(named(looked_up(context, op, op.input(0)), "lookup")));
}

// --- Searches ---------------------------------------------------------------

// Each point after the first takes a pass over all, and an arg-max.
OpCost fps_cost(const OpView& op, CostContext& context) {
  const TensorId points = op.input_id(0);
  OpCost step = times(tensor_pass(context, op, points, 3), 2);
  step += times(reduction_of(context, op, points, 1), kArgument);
  const int64_t count = op.has_output(0) ? op.output(0).numel() : 1;
  return glued(
      named(assumed(times(step, static_cast<double>(count))), "search"));
}

// The distances of all pairs, and an arg-min of each row.
OpCost nearest_cost(const OpView& op, CostContext& context) {
  const Tensor& x = op.input(0);
  const Tensor& y = op.input(1);
  const int64_t num_y = y.shape.empty() ? 1 : y.shape[0];
  const int64_t pairs = ceil_div(x.numel() * num_y, context.tiles);
  OpCost cost = elementwise(pairs, pass(6, false));
  const int64_t rows = x.shape.empty() ? 1 : x.shape[0];
  cost += times(tensor_reduction({ceil_div(rows * num_y, context.tiles),
                                  context.tiles, rows, 4}),
                kArgument);
  return glued(named(assumed(cost), "search"));
}

OpCost beam_search_cost(const OpView& op, CostContext& context) {
  const Tensor& x = op.input(0);
  const int64_t steps = x.shape.empty() ? 1 : x.shape[0];
  const int64_t candidates = op.attribute<int64_t>("beam_width") *
                             (x.shape.empty() ? 1 : x.shape.back());
  OpCost step =
      elementwise(ceil_div(candidates, context.tiles), pass(40, false));
  step += times(tensor_reduction(
                    {ceil_div(candidates, context.tiles), context.tiles, 1, 4}),
                8);
  return glued(
      named(assumed(times(step, static_cast<double>(steps))), "search"));
}

// --- Host and control -------------------------------------------------------

// What goes to the host is part of the time of the program.
OpCost host_cost(const OpView& /*op*/, CostContext& /*context*/) {
  OpCost cost;
  cost.formula = "host";
  return cost;
}

// The bodies have costs of their own.
OpCost control_cost(const OpView& op, CostContext& /*context*/) {
  if (op.op().kind == graph::kYield) return named({}, "control");
  return glued(assumed(named({}, "control")));
}

constexpr CostEntry kOtherCosts[] = {
    {"aten", aten_cost},       {"scatter_reduce", scatter_cost},
    {"take_grid", take_cost},  {"fps", fps_cost},
    {"nearest", nearest_cost}, {"ctc_beam_search", beam_search_cost},
    {"anchor", host_cost},     {"enqueue", host_cost},
    {"host_call", host_cost},  {"position", host_cost},
    {"print", host_cost},      {"branch", control_cost},
    {"loop", control_cost},    {"repeat_while", control_cost},
    {"yield", control_cost},
};

}  // namespace

std::span<const CostEntry> other_costs() { return kOtherCosts; }

}  // namespace popsim::machine
