// Operators of ATen by their names, searches, and what runs on the host.
#include <array>
#include <cmath>
#include <string>
#include <string_view>

#include "machine/cost/common.h"
#include "machine/cost/products.h"
#include "machine/formulas/lookup.h"
#include "machine/formulas/rearrange.h"

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
constexpr std::array<std::string_view, 3> kTransforms = {"_fft_r2c", "_fft_c2c",
                                                         "_fft_c2r"};
constexpr std::array<std::string_view, 4> kProducts = {"mm", "bmm", "addmm",
                                                       "baddbmm"};
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

// Fourier transforms: log2(n) passes over all numbers, where n is the length of
// a line, or of all lines through a number. Once the lines move to the tiles
// that transform them.
OpCost transformed(CostContext& context, const OpView& op, TensorId largest) {
  const Tensor& x = op.graph().tensor(largest);
  const auto& arguments = op.attribute<graph::Arguments>("arguments").values;
  int64_t length = 1;
  for (const graph::Argument& argument : arguments) {
    const auto* axes = std::get_if<std::vector<int64_t>>(&argument);
    if (axes == nullptr) continue;
    for (const int64_t axis : *axes) {
      const auto rank = static_cast<int64_t>(x.shape.size());
      const int64_t at = axis < 0 ? axis + rank : axis;
      if (at >= 0 && at < rank) length *= x.shape[static_cast<size_t>(at)];
    }
  }
  OpCost cost =
      times(tensor_pass(context, op, largest, 3),
            std::log2(static_cast<double>(std::max<int64_t>(length, 2))));
  const int64_t bytes = x.numel() * device_size(x.dtype);
  cost += move(static_cast<double>(ceil_div(bytes, context.tiles)));
  return cost;
}

// A product of complex numbers takes four products of real numbers: as one with
// operands of twice the inner size, and twice the columns.
OpCost complex_product(CostContext& context, const OpView& op) {
  const size_t first = op.num_inputs() - 2;  // after what is added
  const Tensor& a = op.input(first);
  const Tensor& b = op.input(first + 1);
  const size_t rank = a.shape.size();
  if (rank < 2 || b.shape.size() != rank) return {};
  MatmulProblem problem;
  problem.m = a.shape[rank - 2];
  problem.k = 2 * a.shape[rank - 1];
  problem.n = 2 * b.shape[rank - 1];
  problem.groups = rank > 2 ? a.shape[0] : 1;
  return cost_of_plan(
      plan_matmul(context.device, context.tiles, context.proportion, problem));
}

bool is_complex_product(const OpView& op, std::string_view name) {
  return has_name(kProducts, name) && op.num_inputs() >= 2 &&
         op.has_output(0) && is_complex(op.output(0).dtype);
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
  } else if (has_name(kTransforms, name)) {
    cost = transformed(context, op, largest);
  } else if (is_complex_product(op, name)) {
    cost = complex_product(context, op);
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

// What takes no time of the tiles: the host does it, and what goes there is
// part of the time of the program; or it is a check of values, which no IPU
// makes.
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
    {"yield", control_cost},   {"within", host_cost},
};

}  // namespace

std::span<const CostEntry> other_costs() { return kOtherCosts; }

}  // namespace popsim::machine
