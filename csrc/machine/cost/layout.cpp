// Copies, joins, slices, lookups and random numbers.
#include <string>
#include <vector>

#include "machine/cost/common.h"
#include "machine/formulas/lookup.h"
#include "machine/formulas/rearrange.h"

namespace popsim::machine {
namespace {

using graph::Tensor;
using graph::TensorId;
using ops::OpView;

constexpr double kCopyBytes = 8;  // per cycle, on a tile

// The bytes of the pieces of memory that follow each other.
int64_t piece_bytes(const Tensor& tensor) {
  int64_t elements = 1;
  for (size_t i = tensor.shape.size(); i-- > 0;) {
    if (tensor.shape[i] == 1) continue;
    if (tensor.strides[i] != elements) break;
    elements *= tensor.shape[i];
  }
  return elements * device_size(tensor.dtype);
}

// Whether only the last two axes change places.
bool is_transpose(const Tensor& tensor) {
  const size_t rank = tensor.shape.size();
  if (rank < 2) return false;
  Shape shape = tensor.shape;
  Strides strides = tensor.strides;
  std::swap(shape[rank - 1], shape[rank - 2]);
  std::swap(strides[rank - 1], strides[rank - 2]);
  return is_contiguous(shape, strides);
}

double bytes_per_tile(CostContext& context, const OpView& op, TensorId id) {
  const Tensor& tensor = op.graph().tensor(id);
  const int64_t bytes = tensor.numel() * device_size(tensor.dtype);
  return static_cast<double>(ceil_div(bytes, context.layouts.of(id).tiles));
}

OpCost plain_copy(double bytes) {
  OpCost cost;
  cost.compute = constants::kVertex.value + bytes / kCopyBytes;
  cost.sync = constants::kSync.value;
  cost.formula = "copy";
  return cost;
}

// Whether the axes lie in their order: a part of a tensor, with gaps.
bool is_part(const Tensor& tensor) {
  int64_t last = 0;
  for (size_t i = tensor.shape.size(); i-- > 0;) {
    if (tensor.shape[i] == 1) continue;
    if (tensor.strides[i] <= last) return false;
    last = tensor.strides[i];
  }
  return true;
}

// Each tile gets the distinct elements that it needs, and repeats them.
OpCost repeated(const OpView& op, const Tensor& x, double bytes) {
  const Tensor& owner = op.graph().tensor(op.graph().root(op.input_id(0)));
  const auto memory = static_cast<double>(owner.numel() * device_size(x.dtype));
  OpCost cost = move(std::min(bytes, memory));
  cost += plain_copy(bytes);
  return assumed(named(cost, "copy"));
}

OpCost copy_cost(const OpView& op, CostContext& context) {
  const Tensor& x = op.input(0);
  const TensorId output = op.has_output(0) ? op.output_id(0) : op.input_id(0);
  follow(context, op, op.input_id(0));
  const double bytes = bytes_per_tile(context, op, output);
  OpCost cost;
  if (x.dtype != op.graph().tensor(output).dtype) {
    const bool of_integers =
        !is_floating(x.dtype) || !is_floating(op.graph().tensor(output).dtype);
    cost += cast(context.layouts.elements_per_tile(output), of_integers);
  }
  if (repeats_elements(op, op.input_id(0))) {
    cost += repeated(op, x, bytes);
  } else if (is_part(x) && !x.contiguous()) {
    cost += assumed(plain_copy(bytes));
  } else if (is_transpose(x)) {
    cost += rearrange_operand(bytes, device_size(x.dtype));
  } else if (!x.contiguous()) {
    cost += rearrange(bytes, piece_bytes(x));
  } else if (cost.formula.empty()) {
    cost += plain_copy(bytes);
  }
  return glued(cost);
}

OpCost cat_cost(const OpView& op, CostContext& context) {
  const TensorId output = op.has_output(0) ? op.output_id(0) : op.input_id(0);
  return glued(assumed(plain_copy(bytes_per_tile(context, op, output))));
}

OpCost into_zeros_cost(const OpView& op, CostContext& context) {
  const TensorId output = op.has_output(0) ? op.output_id(0) : op.input_id(0);
  OpCost cost = fill(context.layouts.elements_per_tile(output),
                     is_half(op.graph().tensor(output).dtype));
  cost += plain_copy(bytes_per_tile(context, op, op.input_id(0)));
  return glued(assumed(named(cost, "copy")));
}

// Rows of a slice on the fullest tile, and their bytes.
OpCost slice_of(CostContext& context, const OpView& op, const Tensor& part) {
  const auto axis = static_cast<size_t>(op.attribute<int64_t>("axis"));
  const int64_t rows = axis < part.shape.size() ? part.shape[axis] : 1;
  const int64_t bytes = part.numel() * device_size(part.dtype);
  const int64_t row_bytes =
      ceil_div(bytes, std::max<int64_t>(rows, 1) * context.tiles);
  return glued(dynamic_slice(rows, row_bytes));
}

OpCost dynamic_slice_cost(const OpView& op, CostContext& context) {
  return slice_of(context, op, op.has_output(0) ? op.output(0) : op.input(0));
}

OpCost dynamic_update_cost(const OpView& op, CostContext& context) {
  follow(context, op, op.input_id(0));
  return slice_of(context, op, op.input(1));
}

// --- Lookups ----------------------------------------------------------------

int64_t width_of(const Tensor& table, int64_t rows) {
  return table.numel() / std::max<int64_t>(rows, 1);
}

Layout table_layout(const LookupPlan& plan, const Tensor& table,
                    Layouts& layouts) {
  return layouts.even(table.numel() * device_size(table.dtype),
                      plan.rows * plan.width * plan.indices, table.numel());
}

OpCost embedding_cost(const OpView& op, CostContext& context) {
  const Tensor& table = op.input(0);
  const int64_t rows = table.shape.empty() ? 1 : table.shape[0];
  const LookupPlan plan = plan_lookup(
      context.tiles, {rows, width_of(table, rows), op.input(1).numel(),
                      device_size(table.dtype), false});
  context.layouts.place(op.input_id(0),
                        table_layout(plan, table, context.layouts));
  return glued(plan.cost);
}

OpCost embedding_grad_cost(const OpView& op, CostContext& context) {
  const int64_t rows = op.attribute<int64_t>("rows");
  const Tensor& table = op.has_output(0) ? op.output(0) : op.input(0);
  const LookupPlan plan = plan_lookup(
      context.tiles, {rows, width_of(table, rows), op.input(1).numel(),
                      device_size(table.dtype), true});
  OpCost cost = plan.cost;
  if (op.has_output(0)) {
    const Layout layout = table_layout(plan, table, context.layouts);
    context.layouts.place(op.output_id(0), layout);
    cost += fill(ceil_div(layout.bytes_per_tile, device_size(table.dtype)),
                 is_half(table.dtype));
  }
  return glued(cost);
}

// The rows are looked up, then combined.
OpCost embedding_bag_cost(const OpView& op, CostContext& context) {
  OpCost cost = embedding_cost(op, context);
  const int64_t elements = op.input(1).numel() * op.input(0).shape.back();
  cost += elementwise(ceil_div(elements, context.tiles),
                      pass(3, is_half(op.input(0).dtype)));
  return assumed(cost);
}

OpCost embedding_bag_grad_cost(const OpView& op, CostContext& context) {
  return assumed(embedding_grad_cost(op, context));
}

OpCost embedding_bag_weights_grad_cost(const OpView& op, CostContext& context) {
  const Tensor& table = op.input(1);
  const int64_t rows = table.shape.empty() ? 1 : table.shape[0];
  OpCost cost = plan_lookup(context.tiles,
                            {rows, width_of(table, rows), op.input(2).numel(),
                             device_size(table.dtype), false})
                    .cost;
  const int64_t elements = op.input(2).numel() * width_of(table, rows);
  cost += elementwise(ceil_div(elements, context.tiles),
                      pass(3, is_half(table.dtype)));
  return glued(assumed(cost));
}

// --- Random numbers ---------------------------------------------------------

OpCost random_cost(const OpView& op, CostContext& context) {
  const TensorId output =
      op.has_output(0) ? op.output_id(0) : largest_tensor(op);
  if (output == graph::kNoTensor) return glued({});
  const bool is_bernoulli =
      op.attribute<std::string>("distribution") == "bernoulli";
  return glued(random_numbers(context.layouts.elements_per_tile(output),
                              is_bernoulli ? 1 : 4,
                              is_half(op.graph().tensor(output).dtype)));
}

constexpr CostEntry kLayoutCosts[] = {
    {"copy", copy_cost},
    {"cat", cat_cost},
    {"into_zeros", into_zeros_cost},
    {"dynamic_slice", dynamic_slice_cost},
    {"dynamic_update", dynamic_update_cost},
    {"embedding", embedding_cost},
    {"embedding_grad", embedding_grad_cost},
    {"embedding_bag", embedding_bag_cost},
    {"embedding_bag_grad", embedding_bag_grad_cost},
    {"embedding_bag_weights_grad", embedding_bag_weights_grad_cost},
    {"random", random_cost},
};

}  // namespace

std::span<const CostEntry> layout_costs() { return kLayoutCosts; }

}  // namespace popsim::machine
