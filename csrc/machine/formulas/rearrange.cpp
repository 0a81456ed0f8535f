#include "machine/formulas/rearrange.h"

#include <algorithm>

namespace popsim::machine {
namespace {

OpCost moved(double bytes_per_tile) {
  OpCost cost;
  cost.exchange = bytes_per_tile / constants::kExchangeBytes;
  cost.sync = 2 * constants::kSync.value;
  cost.temporary_bytes = static_cast<int64_t>(bytes_per_tile);
  cost.exchanges = true;
  cost.formula = "rearrange";
  return cost;
}

}  // namespace

// PopLibs, poplin/ConvPlan.
OpCost rearrange_operand(double bytes_per_tile, int64_t size) {
  OpCost cost = moved(bytes_per_tile);
  const auto word = static_cast<double>(std::min<int64_t>(8, size));
  cost.compute = bytes_per_tile * 5 / (4 * word);
  return cost;
}

// PopLibs: a regression over 10,000 layouts.
OpCost rearrange(double bytes_per_tile, int64_t piece) {
  OpCost cost = moved(bytes_per_tile);
  const double per_kib = piece % 8 == 0 ? 451 : piece % 4 == 0 ? 3200 : 5271;
  cost.compute = 587 + bytes_per_tile / 1024 * per_kib;
  return cost;
}

OpCost move(double bytes_per_tile) {
  OpCost cost = moved(bytes_per_tile);
  cost.sync = constants::kSync.value;
  return cost;
}

}  // namespace popsim::machine
