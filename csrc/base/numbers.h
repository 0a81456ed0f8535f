// Small functions of whole numbers.
#pragma once

#include <cstdint>

namespace popsim {

// value / unit, rounded up. `value` is not negative.
[[nodiscard]] constexpr int64_t ceil_div(int64_t value, int64_t unit) {
  return (value + unit - 1) / unit;
}

// The smallest multiple of `unit` that is not less. `value` is not negative.
[[nodiscard]] constexpr int64_t round_up(int64_t value, int64_t unit) {
  return ceil_div(value, unit) * unit;
}

}  // namespace popsim
