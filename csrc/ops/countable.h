// Amounts of work that might be too large for an integer.
#pragma once

#include <cstdint>

namespace popsim::ops {

// The amount as an integer, up to a limit above which differences do not
// matter.
[[nodiscard]] constexpr int64_t countable(double amount) {
  constexpr double kMost = int64_t{1} << 48;
  return static_cast<int64_t>(amount < kMost ? amount : kMost);
}

}  // namespace popsim::ops
