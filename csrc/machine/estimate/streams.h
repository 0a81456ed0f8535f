// What goes to and from the host, and how long it takes.
#pragma once

#include <cstdint>
#include <vector>

#include "machine/estimate/places.h"
#include "machine/estimate/settings.h"

namespace popsim::machine {

// Bytes and copies of one execution, averaged over the micro-batches of a call.
struct HostTraffic {
  double bytes_in = 0;
  double bytes_out = 0;
  double copies = 0;
  double blocking = 0;  // calls of host functions, which the device waits for

  HostTraffic& operator+=(const HostTraffic& other);
};

// Whether an op sends its inputs to the host.
[[nodiscard]] bool goes_to_host(const graph::Op& op);

// What each op exchanges with the host. An input counts for the op that reads
// it first.
[[nodiscard]] std::vector<HostTraffic> host_traffic(const graph::Graph& graph,
                                                    const Settings& settings,
                                                    const Places& places);

// Cycles of the IPU's clock. `streaming` is the number of IPUs of a machine
// that exchange data with the host.
[[nodiscard]] double host_cycles(const HostTraffic& traffic,
                                 const Settings& settings, int64_t streaming);

// The cycles of a call's beginning and end, whatever it sends.
[[nodiscard]] double round_trip_cycles();

}  // namespace popsim::machine
