// What each op of a program costs, with the bodies that it runs.
#pragma once

#include <vector>

#include "machine/cost/cost.h"
#include "machine/estimate/places.h"
#include "machine/estimate/settings.h"

namespace popsim::machine {

// The cost of one execution of each op; ops of the setup phase cost nothing.
// Sets the layouts of the tensors.
[[nodiscard]] std::vector<OpCost> program_costs(const graph::Graph& graph,
                                                const Settings& settings,
                                                const Places& places,
                                                Layouts& layouts);

}  // namespace popsim::machine
