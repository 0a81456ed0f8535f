// What is compiled for each target: the ops with their kernels, and what else
// of dense is asked for by others.
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
  bool (*emulate_tile_units)(bool on);
  int64_t (*num_emulated_products)();
};

// The kernels of the target in use, which the first call settles.
[[nodiscard]] const Kernels& kernels();

}  // namespace popsim::ops
