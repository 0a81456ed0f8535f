// What several rules need.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <vector>

#include "base/numbers.h"
#include "machine/cost/cost.h"
#include "machine/cost/entries.h"
#include "machine/formulas/elementwise.h"
#include "machine/formulas/reduction.h"

namespace popsim::machine {

[[nodiscard]] inline bool is_half(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

// The cost with the control code that every op has. The grade of an op is that
// of its compute and exchange cycles.
[[nodiscard]] inline OpCost glued(OpCost cost) {
  cost.glue += constants::kGlue.value;
  return cost;
}

[[nodiscard]] inline OpCost assumed(OpCost cost) {
  cost.grade = worse(cost.grade, Grade::kAssumed);
  return cost;
}

[[nodiscard]] inline OpCost named(OpCost cost, const char* formula) {
  cost.formula = formula;
  return cost;
}

[[nodiscard]] inline OpCost times(OpCost cost, double count) {
  cost *= count;
  return cost;
}

[[nodiscard]] inline const std::vector<int64_t>& list_of(
    const ops::OpView& op, std::string_view name) {
  return op.attribute<std::vector<int64_t>>(name);
}

// The largest input or output of an op, where most of its work is.
[[nodiscard]] graph::TensorId largest_tensor(const ops::OpView& op);

// A pass over all elements of a tensor: `cycles` treat a vector of 8 bytes.
[[nodiscard]] OpCost tensor_pass(CostContext& context, const ops::OpView& op,
                                 graph::TensorId id, double cycles);
// A reduction of a tensor to `results` numbers.
[[nodiscard]] OpCost reduction_of(CostContext& context, const ops::OpView& op,
                                  graph::TensorId id, int64_t results);
// The cycles to bring an operand to the tiles of a layout; none if it is there.
[[nodiscard]] OpCost bring(CostContext& context, const ops::OpView& op,
                           graph::TensorId id, const Layout& layout);
// Whether a tensor is a view that repeats elements: it is broadcast.
[[nodiscard]] bool repeats_elements(const ops::OpView& op, graph::TensorId id);
// Gives the outputs of the same number of elements the layout of a tensor; a
// tensor that repeats elements has none to give.
void follow(CostContext& context, const ops::OpView& op, graph::TensorId id);

}  // namespace popsim::machine
