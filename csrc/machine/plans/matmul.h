// How a matrix product is divided over the tiles of an IPU.
//
// PopLibs, poplin/ConvPlan: a product is a convolution with kernels of one
// element. Its output channels, its input channels (the inner dimension) and
// its field (the other dimension) are divided; the rest is done in turns.
#pragma once

#include <cstdint>
#include <string>

#include "machine/constants.h"
#include "machine/device.h"
#include "machine/formulas/product_unit.h"

namespace popsim::machine {

// [m, k] x [k, n], `groups` times.
struct MatmulProblem {
  int64_t m = 0;
  int64_t k = 0;
  int64_t n = 0;
  int64_t groups = 1;
  ProductTypes types;
  bool float_result = true;  // of float16 operands: whether the result is wide

  friend auto operator<=>(const MatmulProblem&, const MatmulProblem&) = default;
};

struct MatmulPlan {
  // Parts of the field, of the input channels, of the output channels and of
  // the groups: each on tiles of its own.
  int64_t field = 1;
  int64_t in = 1;
  int64_t out = 1;
  int64_t groups = 1;
  // Turns, one after the other: over output channels and over input channels.
  int64_t out_turns = 1;
  int64_t in_turns = 1;
  bool swapped = false;  // the rows of the first operand are the field
  // Cycles of one turn.
  double exchange_in = 0;
  double exchange_weights = 0;
  double compute = 0;
  double exchange_partials = 0;
  double reduce = 0;
  double slice = 0;
  int64_t phases = 1;
  double rearrange = 0;        // once
  double cycles = 0;           // all
  double sync = 0;             // of them
  double temporary_bytes = 0;  // on a tile

  [[nodiscard]] int64_t tiles() const { return field * in * out * groups; }
  [[nodiscard]] int64_t turns() const { return out_turns * in_turns; }
};

// The cheapest plan whose temporaries take at most `proportion` of a tile; if
// there is none, the smallest one. Plans are kept: the same question is
// answered at once. `sync` is the cost of a phase in cycles.
[[nodiscard]] MatmulPlan plan_matmul(const Device& device, int64_t tiles,
                                     double proportion,
                                     const MatmulProblem& problem,
                                     double sync = constants::kSync.value);

[[nodiscard]] std::string to_string(const MatmulPlan& plan);

}  // namespace popsim::machine
