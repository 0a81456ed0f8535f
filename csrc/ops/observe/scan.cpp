#include "ops/observe/scan.h"

#include <algorithm>

namespace popsim::ops::observe {
namespace {

// From 65520 on, numbers are rounded to infinity in float16; up to 2^-25, to 0.
constexpr int32_t kHalfOverflow = 0x477ff000;
constexpr int32_t kHalfUnderflow = 0x33000000;

}  // namespace

int32_t largest_magnitude(const float* values, int64_t count) {
  int32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    largest = std::max(largest, magnitude_bits(values[i]));
  }
  return largest;
}

SizeCounter::SizeCounter(int32_t smallest_normal)
    : smallest_normal_(smallest_normal),
      small_(std::max(smallest_normal, kHalfUnderflow + 1)) {}

void SizeCounter::count(const float* values, int64_t count, int32_t largest,
                        SizeCounts& counts) const {
  int32_t zeros = 0;
  int32_t small = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t bits = magnitude_bits(values[i]);
    zeros += bits == 0 ? 1 : 0;
    small += bits < small_ ? 1 : 0;
  }
  counts.zeros += zeros;
  if (small != zeros) {
    int32_t subnormals = 0;
    int32_t underflows = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int32_t bits = magnitude_bits(values[i]);
      subnormals += bits < smallest_normal_ ? 1 : 0;
      underflows += bits <= kHalfUnderflow ? 1 : 0;
    }
    counts.subnormals += subnormals - zeros;
    counts.half_underflows += underflows - zeros;
  }
  if (largest >= kHalfOverflow) {
    for (int64_t i = 0; i < count; ++i) {
      counts.half_overflows += magnitude_bits(values[i]) >= kHalfOverflow;
    }
  }
}

}  // namespace popsim::ops::observe
