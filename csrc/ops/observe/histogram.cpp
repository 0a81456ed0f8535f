#include "ops/observe/histogram.h"

#include <algorithm>
#include <bit>

#include "ops/observe/blocks.h"

namespace popsim::ops::observe {
namespace {

constexpr int64_t kRun = 16;  // the values of a cache line

// Copies have to be cleared and added up.
int64_t num_copies_for(int64_t num_bins, int64_t num_values) {
  return num_values >= 8 * num_bins ? 4 : num_values >= 2 * num_bins ? 2 : 1;
}

template <size_t kCopies>
void count_values(const float* values, int64_t count, int shift, uint32_t* bins,
                  size_t num_bins) {
  const auto bin = [&](int64_t i) {
    return static_cast<size_t>(std::bit_cast<uint32_t>(values[i]) >> shift);
  };
  int64_t i = 0;
  for (; i + kRun <= count; i += kRun) {
    prefetch_next_block(values + i);
#pragma GCC unroll 16
    for (int64_t j = 0; j < kRun; ++j) {
      ++bins[static_cast<size_t>(j) % kCopies * num_bins + bin(i + j)];
    }
  }
  for (; i < count; ++i) ++bins[bin(i)];
}

}  // namespace

Bins::Bins(int64_t mantissa_bits, int64_t num_values)
    : mantissa_bits_(mantissa_bits),
      num_copies_(num_copies_for(int64_t{512} << mantissa_bits, num_values)),
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

void Bins::fold() {
  const size_t num_bins = size_t{512} << mantissa_bits_;
  for (size_t copy = num_bins; copy < counts_.size(); copy += num_bins) {
    for (size_t i = 0; i < num_bins; ++i) counts_[i] += counts_[copy + i];
  }
}

void Bins::add_to(double* negative, double* positive) const {
  const size_t half = size_t{256} << mantissa_bits_;
  for (size_t i = 0; i < half; ++i) {
    positive[i] += static_cast<double>(counts_[i]);
    negative[i] += static_cast<double>(counts_[half + i]);
  }
}

}  // namespace popsim::ops::observe
