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

struct OtherCounts {
  int64_t nans = 0;
  int64_t infs = 0;
};

// Adds the numbers of values that are not finite.
void count_others(const float* values, int64_t count, OtherCounts& counts);
void count_others(const double* values, int64_t count, OtherCounts& counts);

// Writes the finite values to `out`, which has room for all values, and returns
// how many there are.
int64_t take_finite(const float* values, int64_t count, float* out);
int64_t take_finite(const double* values, int64_t count, double* out);

}  // namespace popsim::ops::observe
