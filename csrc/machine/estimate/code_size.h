// The size of a program's code on a tile.
#pragma once

#include <cstdint>
#include <vector>

#include "machine/cost/cost.h"

namespace popsim::machine {

// Equal ops have one copy of their code, as after outlining.
[[nodiscard]] int64_t code_bytes(const graph::Graph& graph,
                                 const std::vector<int32_t>& ipu_of_op,
                                 const std::vector<OpCost>& costs, int32_t ipu);

}  // namespace popsim::machine
