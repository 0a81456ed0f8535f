// What a program costs on a simulated machine. Nothing runs, and no value of a
// tensor is read.
#pragma once

#include <vector>

#include "machine/estimate/memory.h"
#include "machine/estimate/settings.h"
#include "machine/estimate/timeline.h"

namespace popsim::machine {

struct Estimate {
  std::vector<OpCost> ops;  // of one execution
  std::vector<int32_t> ipu_of_op;
  Memory memory;
  ProgramTime time;
};

// Throws UserError if an IPU has no tiles left to compute.
[[nodiscard]] Estimate estimate(const graph::Graph& graph,
                                const Settings& settings);

}  // namespace popsim::machine
