#include "machine/cost/entries.h"

namespace popsim::machine {

std::span<const CostEntry> convolution_costs() { return {}; }

}  // namespace popsim::machine
