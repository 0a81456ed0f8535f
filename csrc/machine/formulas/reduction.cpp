#include "machine/formulas/reduction.h"

#include <algorithm>

#include "base/numbers.h"
#include "machine/formulas/partials.h"

namespace popsim::machine {

OpCost tensor_reduction(const ReductionSizes& sizes) {
  constexpr int64_t kW = constants::kWorkers;
  constexpr int64_t kPartialBytes = 4;
  const int64_t vector = 8 / sizes.size;
  const int64_t vectors = ceil_div(ceil_div(sizes.elements, kW), vector);
  OpCost cost;
  cost.compute =
      constants::kVertex.value + static_cast<double>(kW * (60 + vectors * 5));
  cost.exchange = static_cast<double>(sizes.elements * sizes.size) /
                  constants::kExchangeBytes;
  cost.sync = 2 * constants::kSync.value;
  cost.grade = Grade::kFitted;
  cost.formula = "reduction";
  cost.exchanges = true;
  cost.temporary_bytes = sizes.elements * sizes.size;
  const int64_t results = std::max<int64_t>(sizes.results, 1);
  const int64_t depth = sizes.tiles / results;  // tiles of one result
  if (depth < 2) return cost;
  int64_t partials = ceil_div(results * depth, sizes.tiles);
  for (const int64_t k : reduction_depths(depth)) {
    const auto count = static_cast<double>(k);
    cost.exchange += static_cast<double>(partials * kPartialBytes) *
                     (count - 1) / count / constants::kExchangeBytes;
    partials = ceil_div(partials, k);
    cost.compute += reduce_partials(partials, k, true, sizes.size == 4);
    cost.sync += 2 * constants::kSync.value;
  }
  return cost;
}

}  // namespace popsim::machine
