#include "machine/device.h"

#include "base/check.h"

namespace popsim::machine {

// Spec sheets of the IPU-M2000 and Bow-2000; for Mk1, arXiv 1912.03413.
Device device_of(int32_t version) {
  constexpr int64_t kMk1TileBytes = 262'144;
  constexpr int64_t kMk2TileBytes = 638'976;
  switch (version) {
    case 1:
      return {"Mk1 GC2", 1, 1216, kMk1TileBytes, 1.6e9, 10, true};
    case 2:
      return {"Mk2 GC200", 2, 1472, kMk2TileBytes, 1.33e9, 10, true};
    case 21:
      return {"Bow", 21, 1472, kMk2TileBytes, 1.85e9, 10, true};
    default:
      throw UserError(
          join("there is no IPU of version ", version, ": use 1, 2 or 21"));
  }
}

}  // namespace popsim::machine
