// Counts values by the size of their magnitudes, which are compared as bits: so
// a thread that takes subnormal numbers for zero counts them all the same.
#pragma once

#include <bit>
#include <cstdint>

namespace popsim::ops::observe {

inline constexpr int32_t kInfinityBits = 0x7f800000;

// Signed, since these are what vectors of all processors compare.
[[nodiscard]] inline int32_t magnitude_bits(float value) {
  return std::bit_cast<int32_t>(value) & 0x7fffffff;
}

// The largest magnitude, as bits; above kInfinityBits if a value is NaN.
[[nodiscard]] int32_t largest_magnitude(const float* values, int64_t count);

struct SizeCounts {
  int64_t zeros = 0;
  int64_t subnormals = 0;
  int64_t half_overflows = 0;  // and those that are infinite or NaN
  int64_t half_underflows = 0;
};

// Adds the counts of at most a block.
class SizeCounter {
 public:
  // `smallest_normal`: bits of the smallest normal number of the dtype.
  explicit SizeCounter(int32_t smallest_normal);

  // `largest`: largest_magnitude() of the values.
  void count(const float* values, int64_t count, int32_t largest,
             SizeCounts& counts) const;

 private:
  int32_t smallest_normal_;
  int32_t small_;  // from here on values count as neither of the small ones
};

// Writes the finite values to `out` and returns how many there are; counts the
// others.
template <typename T>
int64_t take_finite(const T* values, int64_t count, T* out, int64_t& nans,
                    int64_t& infs) {
  int64_t taken = 0;
  int64_t num_nans = 0;
  for (int64_t i = 0; i < count; ++i) {
    const T value = values[i];
    out[taken] = value;
    // The difference of a number that is not finite is NaN.
    taken += value - value == T{0} ? 1 : 0;
    num_nans += value != value ? 1 : 0;
  }
  nans += num_nans;
  infs += count - taken - num_nans;
  return taken;
}

}  // namespace popsim::ops::observe
