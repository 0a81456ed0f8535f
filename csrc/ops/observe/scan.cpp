#include "ops/observe/scan.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "ops/math/vec_math.h"

namespace popsim::ops::observe {
namespace {

// From 65520 on, numbers are rounded to infinity in float16; up to 2^-25, to 0.
constexpr int32_t kHalfOverflow = 0x477ff000;
constexpr int32_t kHalfUnderflow = 0x33000000;

// Continues after the values that are taken already.
template <typename T>
int64_t take_one_by_one(const T* values, int64_t begin, int64_t end, T* out,
                        int64_t taken) {
  for (int64_t i = begin; i < end; ++i) {
    const T value = values[i];
    out[taken] = value;
    // The difference of a number that is not finite is NaN.
    taken += value - value == T{0} ? 1 : 0;
  }
  return taken;
}

#if defined(CPU_CAPABILITY_AVX512)

int64_t take_vectors(const float* values, int64_t count, float* out,
                     int64_t& done) {
  int64_t taken = 0;
  for (; done + 16 <= count; done += 16) {
    const __m512 x = _mm512_loadu_ps(values + done);
    const __m512 difference = _mm512_sub_ps(x, x);
    const __mmask16 finite =
        _mm512_cmp_ps_mask(difference, difference, _CMP_ORD_Q);
    _mm512_storeu_ps(out + taken, _mm512_maskz_compress_ps(finite, x));
    taken += std::popcount(static_cast<uint32_t>(finite));
  }
  return taken;
}

#elif defined(CPU_CAPABILITY_AVX2)

// For each set of lanes, the lanes in order.
struct LaneLists {
  alignas(32) std::array<std::array<int32_t, 8>, 256> lanes{};
};

constexpr LaneLists make_lane_lists() {
  LaneLists lists;
  for (size_t set = 0; set < 256; ++set) {
    size_t place = 0;
    for (size_t lane = 0; lane < 8; ++lane) {
      if ((set >> lane & 1) == 0) continue;
      lists.lanes[set][place++] = static_cast<int32_t>(lane);
    }
  }
  return lists;
}

constexpr LaneLists kLaneLists = make_lane_lists();

int64_t take_vectors(const float* values, int64_t count, float* out,
                     int64_t& done) {
  int64_t taken = 0;
  for (; done + 8 <= count; done += 8) {
    const __m256 x = _mm256_loadu_ps(values + done);
    const __m256 difference = _mm256_sub_ps(x, x);
    const auto finite = static_cast<uint32_t>(
        _mm256_movemask_ps(_mm256_cmp_ps(difference, difference, _CMP_ORD_Q)));
    const __m256i lanes = _mm256_load_si256(
        reinterpret_cast<const __m256i*>(kLaneLists.lanes[finite].data()));
    _mm256_storeu_ps(out + taken, _mm256_permutevar8x32_ps(x, lanes));
    taken += std::popcount(finite);
  }
  return taken;
}

#else

int64_t take_vectors(const float* /*values*/, int64_t /*count*/, float* /*out*/,
                     int64_t& /*done*/) {
  return 0;
}

#endif

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

void count_others(const float* values, int64_t count, OtherCounts& counts) {
  int32_t nans = 0;
  int32_t others = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t bits = magnitude_bits(values[i]);
    nans += bits > kInfinityBits ? 1 : 0;
    others += bits >= kInfinityBits ? 1 : 0;
  }
  counts.nans += nans;
  counts.infs += others - nans;
}

void count_others(const double* values, int64_t count, OtherCounts& counts) {
  for (int64_t i = 0; i < count; ++i) {
    counts.nans += std::isnan(values[i]) ? 1 : 0;
    counts.infs += std::isinf(values[i]) ? 1 : 0;
  }
}

int64_t take_finite(const float* values, int64_t count, float* out) {
  int64_t done = 0;
  const int64_t taken = take_vectors(values, count, out, done);
  return take_one_by_one(values, done, count, out, taken);
}

int64_t take_finite(const double* values, int64_t count, double* out) {
  return take_one_by_one(values, 0, count, out, 0);
}

}  // namespace popsim::ops::observe
