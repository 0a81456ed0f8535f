// The code that is compiled for each target: the ops with their kernels, and
// the functions of dense that other code uses.
#pragma once

#include <cstdint>
#include <span>

#include "dense/problem/matmul.h"
#include "ops/op_def.h"

namespace popsim::ops {

struct Kernels {
  std::span<const OpDef* const> ops;
  bool (*can_fuse)(const dense::MatmulSpec& spec);
  bool (*has_tile_units)();
  bool (*multiplies_tiles)(int num_parts);
  bool (*emulate_tile_units)(bool on);
  int64_t (*num_emulated_products)();
};

// The kernels of the target in use; after the first call the target cannot
// change.
[[nodiscard]] const Kernels& kernels();

}  // namespace popsim::ops
