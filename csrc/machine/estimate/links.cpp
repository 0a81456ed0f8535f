#include "machine/estimate/links.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <utility>

#include "machine/constants.h"

namespace popsim::machine {
namespace {

constexpr int64_t kAllLinks = 10;      // of an IPU, on boards with all links
constexpr int64_t kNearReplicas = 64;  // IPUs that links join directly

double scaled(const Device& device, double rate) {
  return rate * static_cast<double>(device.links) /
         static_cast<double>(kAllLinks);
}

// Bytes per second.
double all_reduce_rate(const Device& device, int64_t replicas, int64_t ipus) {
  if (replicas * ipus > kNearReplicas) return constants::kFarAllReduce.value;
  const bool is_pair = replicas == 2 && ipus == 1;
  return is_pair ? scaled(device, constants::kPairRate.value)
                 : constants::kAllReduce.value;
}

}  // namespace

double external_sync(const Device& device, int64_t num_ipus) {
  if (num_ipus < 2) return 0;
  const auto hops = static_cast<double>(1 + num_ipus / 2 / 2);
  return constants::kExternalSync.value +
         2 * hops * device.cycles_of(constants::kHopSeconds.value);
}

double link_cycles(const Device& device,
                   const std::vector<Transfer>& transfers) {
  // Bytes by way: within a rung, or from a rung to a neighbour.
  std::map<std::pair<int32_t, int32_t>, double> ways;
  std::map<std::pair<int32_t, int32_t>, double> pairs;
  for (const Transfer& one : transfers) {
    const int32_t from = one.from / 2;
    const int32_t to = one.to / 2;
    if (from == to) {
      pairs[{one.from, one.to}] += one.bytes;
      continue;
    }
    const int32_t step = from < to ? 1 : -1;
    for (int32_t rung = from; rung != to; rung += step) {
      ways[{rung, rung + step}] += one.bytes;
    }
  }
  double seconds = 0;
  for (const auto& [way, bytes] : pairs) {
    seconds =
        std::max(seconds, bytes / scaled(device, constants::kPairRate.value));
  }
  for (const auto& [way, bytes] : ways) {
    seconds = std::max(seconds,
                       bytes / scaled(device, constants::kNeighbourRate.value));
  }
  return device.cycles_of(seconds);
}

double all_reduce_bytes(int64_t replicas, double bytes) {
  const auto count = static_cast<double>(replicas);
  return replicas < 2 ? 0 : 2 * (count - 1) / count * bytes;
}

double all_reduce_cycles(const Device& device, int64_t replicas, int64_t ipus,
                         double bytes) {
  if (replicas < 2 || bytes <= 0) return 0;
  const double seconds = all_reduce_bytes(replicas, bytes) /
                         all_reduce_rate(device, replicas, ipus);
  return device.cycles_of(seconds) +
         2 * static_cast<double>(replicas - 1) * constants::kExternalSync.value;
}

}  // namespace popsim::machine
