#include "machine/formulas/product_unit.h"

#include <algorithm>

#include "base/numbers.h"
#include "machine/constants.h"

namespace popsim::machine {
namespace {

// `begins`: the first group of input channels, whose results are written
// instead of added.
int64_t worker_cycles(const ProductTypes& types, int32_t version, int64_t n,
                      bool begins) {
  if (types.half) {
    if (n > 2) return (begins ? 37 : 38) + 4 * (n - 3) - 7;
    constexpr int64_t kFew[] = {20, 31, 40};
    return kFew[n] + (begins ? 1 : 2) - 7;
  }
  const int64_t q = types.units(version) == 16 ? 8 : 4;
  const int64_t z = begins ? 1 : 0;
  if (n == 0) return 24;
  if (n == 1) return 47 + z * (2 + q);
  if (n == 2) return 46 + z * (2 + 2 * q);
  return 46 + z * (2 + q * n) + 8 * (n - 3);
}

int64_t inner_cycles(const ProductTypes& types, int32_t version, int64_t field,
                     bool begins) {
  constexpr int64_t kW = constants::kWorkers;
  const int64_t most =
      kW * worker_cycles(types, version, ceil_div(field, kW), begins);
  const int64_t least =
      kW * worker_cycles(types, version, field / kW, begins) + 14;
  return std::max(most, least);
}

}  // namespace

double product_cycles(const ProductTypes& types, int32_t version, int64_t field,
                      int64_t in, int64_t out, int64_t groups) {
  const int64_t num_in = ceil_div(in, types.channels());
  const int64_t num_out = ceil_div(out, types.units(version));
  const int64_t load = types.load(version);
  const int64_t later = inner_cycles(types, version, field, false);
  const int64_t first = inner_cycles(types, version, field, true);
  int64_t cycles = 50;
  if (types.half) {
    cycles += constants::kWorkers * (7 + 3 * (num_in * groups - 1));
  }
  cycles += groups * (13 + (num_in - 1) * (15 + num_out * (25 + load + later)) +
                      11 + num_out * (25 + load + first));
  return static_cast<double>(cycles);
}

}  // namespace popsim::machine
