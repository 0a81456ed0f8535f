// Cycles of reductions over the axes of a tensor.
#pragma once

#include <cstdint>

#include "machine/op_cost.h"

namespace popsim::machine {

struct ReductionSizes {
  int64_t elements = 0;  // on the fullest tile
  int64_t tiles = 1;     // that have elements
  int64_t results = 1;   // in all
  int64_t size = 4;      // bytes of an element
};

// Each tile reduces what it has, then the partial results are added up. The
// input is assumed not to lie along the reduced axes.
[[nodiscard]] OpCost tensor_reduction(const ReductionSizes& sizes);

}  // namespace popsim::machine
