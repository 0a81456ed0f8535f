#include "machine/formulas/lookup.h"

#include <algorithm>

#include "base/numbers.h"

namespace popsim::machine {
namespace {

// `found` of `all` indices are in the part of the table that the tile has.
double tile_cycles(int64_t found, int64_t all, int64_t width,
                   const LookupSizes& sizes) {
  const int64_t row = sizes.update ? 12 + 3 * width * sizes.size / 4
                                   : 19 + 2 * ceil_div(width, 8 / sizes.size);
  const int64_t rest = std::max<int64_t>(all - found, 0);
  return static_cast<double>(constants::kWorkers *
                             (30 + ceil_div(found, constants::kWorkers) * row +
                              ceil_div(rest, constants::kWorkers) * 8));
}

OpCost price(int64_t tiles, const LookupSizes& sizes, const LookupPlan& plan) {
  const int64_t indices = ceil_div(sizes.indices, plan.indices);
  const int64_t width = ceil_div(sizes.width, plan.width);
  const int64_t found = plan.rows == 1 ? indices : ceil_div(indices, plan.rows);
  OpCost cost;
  cost.compute = tile_cycles(found, indices, width, sizes);
  cost.exchange = static_cast<double>(indices);  // of 4 bytes each
  cost.sync = 2 * constants::kSync.value;
  cost.exchanges = true;
  cost.formula = "lookup";
  cost.temporary_bytes = indices * width * sizes.size;
  if (plan.rows == 1) return cost;
  cost.sync += 2 * constants::kSync.value;
  if (sizes.update) {
    cost.exchange += static_cast<double>(indices * width * sizes.size) /
                     constants::kExchangeBytes;
    return cost;
  }
  const double bytes = static_cast<double>(plan.rows) *
                       static_cast<double>(sizes.indices) *
                       static_cast<double>(sizes.width * sizes.size);
  cost.exchange +=
      bytes / static_cast<double>(tiles) / constants::kExchangeBytes;
  const int64_t own = ceil_div(indices, plan.rows);
  cost.compute += tile_cycles(own, own, width, sizes);
  return cost;
}

}  // namespace

LookupPlan plan_lookup(int64_t tiles, const LookupSizes& sizes) {
  LookupPlan best;
  best.cost = price(tiles, sizes, best);
  const int64_t widest = std::min(tiles, ceil_div(sizes.width * sizes.size, 8));
  for (int64_t width = 1; width <= widest; width *= 2) {
    const int64_t left = tiles / width;
    for (int64_t rows = 1; rows <= std::min(left, sizes.rows); rows *= 2) {
      LookupPlan plan{rows,
                      width,
                      std::clamp<int64_t>(left / rows, 1,
                                          std::max<int64_t>(sizes.indices, 1)),
                      {}};
      plan.cost = price(tiles, sizes, plan);
      if (plan.cost.cycles() < best.cost.cycles()) best = plan;
    }
  }
  return best;
}

OpCost dynamic_slice(int64_t rows, int64_t row_bytes) {
  const int64_t own = ceil_div(rows, constants::kWorkers);
  OpCost cost;
  cost.compute = static_cast<double>(
      25 +
      constants::kWorkers * (39 + own * (24 + 2 * ceil_div(row_bytes, 8))));
  cost.sync = 2 * constants::kSync.value;
  cost.exchange =
      static_cast<double>(rows * row_bytes) / constants::kExchangeBytes;
  cost.exchanges = true;
  cost.formula = "dynamic slice";
  return cost;
}

}  // namespace popsim::machine
