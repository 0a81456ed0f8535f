// What one run of an op costs on a simulated IPU.
//
// Each kind of op has a rule in a file of this folder; the rules read only the
// op, its tensors and their layouts, never the values of tensors.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "machine/constants.h"
#include "machine/device.h"
#include "machine/layout.h"
#include "ops/op_def.h"

namespace popsim::machine {

struct OpCost {
  double compute = 0;   // cycles
  double exchange = 0;  // cycles; data that move between the tiles of an IPU
  double sync = 0;      // cycles
  double glue = 0;      // cycles of control code
  int64_t temporary_bytes = 0;  // on the fullest tile, while the op runs
  // Whether its code includes an exchange, which is larger.
  bool exchanges = false;
  Grade grade = Grade::kPublished;
  std::string formula;  // "elementwise", "matmul", ..; empty: no formula
  std::string plan;     // how a product or convolution is divided; may be empty

  [[nodiscard]] double cycles() const {
    return compute + exchange + sync + glue;
  }
  // Steps that follow each other: temporaries do not add up.
  OpCost& operator+=(const OpCost& next);
  // The same steps, `times` times.
  OpCost& operator*=(double times);
};

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
