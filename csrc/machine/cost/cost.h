// What one run of an op costs on a simulated IPU.
//
// Each kind of op has a rule in a file of this folder; the rules read only the
// op, its tensors and their layouts, never the values of tensors.
#pragma once

#include <cstdint>
#include <string_view>

#include "machine/device.h"
#include "machine/layout.h"
#include "machine/op_cost.h"
#include "ops/op_def.h"

namespace popsim::machine {

// What a rule knows about the machine.
struct CostContext {
  const Device& device;
  int64_t tiles;      // tiles that compute: without those for input and output
  double proportion;  // of a tile's memory, for the temporaries of products
  Layouts& layouts;
};

using CostRule = OpCost (*)(const ops::OpView& op, CostContext& context);

// The rule of a kind of op; nullptr for a kind that runs no code of its own on
// tiles, or that has no formula.
[[nodiscard]] CostRule find_cost_rule(std::string_view kind);
// The cost by the rule of the op; without a rule: no cycles, and Grade::kNone.
[[nodiscard]] OpCost cost_of(const ops::OpView& op, CostContext& context);

}  // namespace popsim::machine
