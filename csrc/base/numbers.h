// Small functions for numbers.
#pragma once

#include <cmath>
#include <cstdint>

namespace popsim {

// value / unit, rounded up. `value` must not be negative.
[[nodiscard]] constexpr int64_t ceil_div(int64_t value, int64_t unit) {
  return (value + unit - 1) / unit;
}

// The smallest multiple of `unit` that is at least `value`. `value` must not be
// negative.
[[nodiscard]] constexpr int64_t round_up(int64_t value, int64_t unit) {
  return ceil_div(value, unit) * unit;
}

// a * b + c; the product is not rounded if the processor has such an
// instruction. It is the scalar form of at::vec::fmadd. Compilers must not
// choose this themselves, or two kernels with the same formula give different
// results (-ffp-contract=off in setup.py).
[[nodiscard]] inline float multiply_add(float a, float b, float c) {
#if defined(FP_FAST_FMAF)
  return std::fma(a, b, c);
#else
  return a * b + c;
#endif
}

}  // namespace popsim
