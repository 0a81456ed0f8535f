// The ops whose code is compiled for each target. Their entries are next to
// their kernels.
#include "ops/kernels.h"

#include <array>

#include "dense/matmul.h"
#include "dense/tile/units.h"
#include "ops/listed.h"

namespace popsim::ops {

const std::array kOps{POPSIM_OPS_OF_TARGETS(POPSIM_LIST_OP)};

}  // namespace popsim::ops

// The only symbol of a target's objects that other code uses.
extern "C" const popsim::ops::Kernels* POPSIM_KERNELS() {
  static const popsim::ops::Kernels kernels{
      .ops = popsim::ops::kOps,
      .can_fuse = &popsim::dense::can_fuse,
      .has_tile_units = &popsim::dense::has_tile_units,
      .multiplies_tiles = &popsim::dense::multiplies_tiles,
      .emulate_tile_units = &popsim::dense::emulate_tile_units,
      .num_emulated_products = &popsim::dense::num_emulated_products};
  return &kernels;
}
