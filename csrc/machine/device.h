// The parts of an IPU that determine times and sizes.
#pragma once

#include <cstdint>
#include <string>

namespace popsim::machine {

struct Device {
  std::string name;         // "Mk2 GC200"
  int32_t version = 2;      // 1, 2 or 21, as in PopTorch's options
  int64_t tiles = 1472;     // of an IPU
  int64_t tile_bytes = 0;   // memory of a tile
  double clock = 0;         // Hz
  int64_t links = 10;       // IPU-links of an IPU
  bool shares_bus = false;  // pairs of tiles share the bus that they receive on

  [[nodiscard]] double cycles_of(double seconds) const {
    return seconds * clock;
  }
  [[nodiscard]] double seconds_of(double cycles) const {
    return cycles / clock;
  }
};

// Throws UserError unless the version is 1, 2 or 21.
[[nodiscard]] Device device_of(int32_t version);

}  // namespace popsim::machine
