// The operations after the sums of a product, for tiles that can apply them in
// registers.
#pragma once

#include <cstdint>

#include "dense/problem/matmul.h"
#include "dense/vector/register_tile.h"

namespace popsim::dense {

// Whether a tile of whole vectors can apply all operations after the sums.
[[nodiscard]] inline bool ends_in_tile(const MatmulSpec& spec) {
  return spec.alpha == 1.0F && spec.beta == 0.0F && !spec.update;
}

// The output of a tile with these operations. In c the tile begins at `offset`,
// which is column `column` of its rows.
[[nodiscard]] inline TileOutput ended_output(const MatmulSpec& spec,
                                             const MatmulOperands& operands,
                                             int64_t offset, int64_t column) {
  return {.data = operands.c_floats() + offset,
          .row = spec.n,
          .bias = spec.bias ? operands.bias + column : nullptr,
          .relu = spec.relu,
          .mask = spec.mask ? operands.mask + offset : nullptr};
}

}  // namespace popsim::dense
