// Moving tensors between layouts.
#pragma once

#include <cstdint>

#include "machine/op_cost.h"

namespace popsim::machine {

// Operands and results of products, and transposes of the last two axes.
[[nodiscard]] OpCost rearrange_operand(double bytes_per_tile, int64_t size);
// Any other permutation, of contiguous pieces of `piece` bytes.
[[nodiscard]] OpCost rearrange(double bytes_per_tile, int64_t piece);
// Data that go to other tiles in their order.
[[nodiscard]] OpCost move(double bytes_per_tile);

}  // namespace popsim::machine
