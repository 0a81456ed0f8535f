// Cycles of lookups in tables: embeddings, gathers, scatters, slices.
//
// PopLibs, popops/DynamicSlice (multiSlice).
#pragma once

#include <cstdint>

#include "machine/op_cost.h"

namespace popsim::machine {

struct LookupSizes {
  int64_t rows = 1;
  int64_t width = 1;    // elements of a row
  int64_t indices = 1;  // rows to read or to change
  int64_t size = 4;     // bytes of an element
  bool update = false;  // rows are added to, not read
};

struct LookupPlan {
  int64_t rows = 1;     // parts of the rows
  int64_t width = 1;    // parts of each row
  int64_t indices = 1;  // parts of the indices
  OpCost cost;
};

[[nodiscard]] LookupPlan plan_lookup(int64_t tiles, const LookupSizes& sizes);

// `rows` of `row_bytes`, on the fullest tile.
[[nodiscard]] OpCost dynamic_slice(int64_t rows, int64_t row_bytes);

}  // namespace popsim::machine
