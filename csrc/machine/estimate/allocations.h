// What lies in the memory of each IPU, and from when to when.
#pragma once

#include <vector>

#include "machine/estimate/memory.h"

namespace popsim::machine {

[[nodiscard]] std::vector<Allocation> find_allocations(
    const graph::Graph& graph, const Settings& settings, const Places& places,
    const std::vector<OpCost>& costs, Layouts& layouts);

}  // namespace popsim::machine
