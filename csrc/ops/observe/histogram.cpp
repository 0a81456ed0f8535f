#include "ops/observe/histogram.h"

#include <algorithm>
#include <bit>

namespace popsim::ops::observe {
namespace {

constexpr int64_t kFewValues = 4096;

int64_t num_copies_for(int64_t mantissa_bits, int64_t num_values) {
  if (num_values < kFewValues) return 1;
  return mantissa_bits < 2 ? 4 : 2;  // at most 32 KB
}

template <size_t kCopies>
void count_values(const float* values, int64_t count, int shift, uint32_t* bins,
                  size_t num_bins) {
  const auto bin = [&](int64_t i) {
    return static_cast<size_t>(std::bit_cast<uint32_t>(values[i]) >> shift);
  };
  int64_t i = 0;
  for (; i + static_cast<int64_t>(kCopies) <= count; i += kCopies) {
#pragma GCC unroll 4
    for (size_t copy = 0; copy < kCopies; ++copy) {
      ++bins[copy * num_bins + bin(i + static_cast<int64_t>(copy))];
    }
  }
  for (; i < count; ++i) ++bins[bin(i)];
}

}  // namespace

Bins::Bins(int64_t mantissa_bits, int64_t num_values)
    : mantissa_bits_(mantissa_bits),
      num_copies_(num_copies_for(mantissa_bits, num_values)),
      counts_(static_cast<size_t>(num_copies_) << (9 + mantissa_bits)) {}

void Bins::clear() { std::ranges::fill(counts_, 0); }

void Bins::add(const float* values, int64_t count) {
  const int shift = 23 - static_cast<int>(mantissa_bits_);
  const size_t num_bins = size_t{512} << mantissa_bits_;
  uint32_t* bins = counts_.data();
  if (num_copies_ == 4) {
    count_values<4>(values, count, shift, bins, num_bins);
  } else if (num_copies_ == 2) {
    count_values<2>(values, count, shift, bins, num_bins);
  } else {
    count_values<1>(values, count, shift, bins, num_bins);
  }
}

void Bins::add_to(double* negative, double* positive) const {
  const size_t half = size_t{256} << mantissa_bits_;
  for (size_t copy = 0; copy < static_cast<size_t>(num_copies_); ++copy) {
    const uint32_t* counts = counts_.data() + 2 * half * copy;
    for (size_t i = 0; i < half; ++i) {
      positive[i] += static_cast<double>(counts[i]);
      negative[i] += static_cast<double>(counts[half + i]);
    }
  }
}

}  // namespace popsim::ops::observe
