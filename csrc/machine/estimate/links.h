// Copies between IPUs, and sums over replicas.
#pragma once

#include <cstdint>
#include <vector>

#include "machine/device.h"

namespace popsim::machine {

struct Transfer {
  int32_t from = 0;
  int32_t to = 0;
  double bytes = 0;
};

// Cycles until all IPUs of a program have met.
[[nodiscard]] double external_sync(const Device& device, int64_t num_ipus);

// Cycles of transfers that run at the same time: the IPUs stand in pairs, the
// rungs of a ladder, and what goes farther shares the links between rungs.
[[nodiscard]] double link_cycles(const Device& device,
                                 const std::vector<Transfer>& transfers);

// Cycles in which `replicas` of `ipus` IPUs each add up `bytes` on each IPU.
[[nodiscard]] double all_reduce_cycles(const Device& device, int64_t replicas,
                                       int64_t ipus, double bytes);
// The bytes that each IPU sends in it.
[[nodiscard]] double all_reduce_bytes(int64_t replicas, double bytes);

}  // namespace popsim::machine
