#include "machine/estimate/estimate.h"

#include <utility>

#include "base/check.h"
#include "machine/estimate/program_costs.h"

namespace popsim::machine {

Estimate estimate(const graph::Graph& graph, const Settings& settings) {
  check_user(settings.compute_tiles() > 0, "estimate: ", settings.io_tiles,
             " of ", settings.device.tiles,
             " tiles are for input and output; none is left to compute");
  Places places = find_places(graph, settings);
  Layouts layouts(graph, settings.compute_tiles());
  Estimate found;
  found.ops = program_costs(graph, settings, places, layouts);
  found.memory = plan_memory(graph, settings, places, found.ops, layouts);
  found.time = plan_time(graph, settings, places, found.ops);
  found.ipu_of_op = std::move(places.ipu_of_op);
  return found;
}

}  // namespace popsim::machine
