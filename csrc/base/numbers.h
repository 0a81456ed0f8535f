// Small functions of numbers.
#pragma once

#include <cmath>
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

// a * b + c, the product not rounded where the processor can do so: what
// at::vec::fmadd is for vectors. Compilers must not choose that themselves, or
// two kernels of the same formula differ (-ffp-contract=off in setup.py).
[[nodiscard]] inline float multiply_add(float a, float b, float c) {
#if defined(FP_FAST_FMAF)
  return std::fma(a, b, c);
#else
  return a * b + c;
#endif
}

}  // namespace popsim
