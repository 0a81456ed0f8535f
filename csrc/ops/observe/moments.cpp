#include "ops/observe/moments.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <type_traits>

#include "ops/math/vec_math.h"

namespace popsim::ops::observe {
namespace {

using Wide = at::vec::Vectorized<double>;

constexpr int64_t kSumLanes = 16;
constexpr int64_t kWideLanes = Wide::size();
constexpr size_t kVectors = kSumLanes / kWideLanes;
using Vectors = std::array<Wide, kVectors>;
using Lanes = std::array<double, kSumLanes>;

// If the sum of squares is this many times the sum of squared distances from
// the mean, the difference of the two sums has lost too many digits.
constexpr double kMostCancelled = 128.0;

inline Wide load_wide(const double* values) { return Wide::loadu(values); }

inline Wide load_wide(const float* values) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_cvtps_pd(_mm256_loadu_ps(values));
#elif defined(CPU_CAPABILITY_AVX2)
  return _mm256_cvtps_pd(_mm_loadu_ps(values));
#else
  std::array<double, kWideLanes> wide;
  for (size_t i = 0; i < wide.size(); ++i) {
    wide[i] = static_cast<double>(values[i]);
  }
  return Wide::loadu(wide.data());
#endif
}

Lanes lanes_of(const Vectors& vectors) {
  Lanes lanes;
  for (size_t i = 0; i < kVectors; ++i) {
    vectors[i].store(lanes.data() + i * static_cast<size_t>(kWideLanes));
  }
  return lanes;
}

double sum_of(Lanes lanes) {
  for (size_t half = kSumLanes / 2; half > 0; half /= 2) {
    for (size_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

struct Sums {
  double values = 0.0;
  double squares = 0.0;
  double magnitudes = 0.0;
};

// The square of a float32 number is exact in float64, so a fused operation
// gives the same bits as two operations.
template <typename T>
inline Wide plus_square(const Wide& sum, const Wide& value) {
  if constexpr (std::is_same_v<T, float>) {
    return at::vec::fmadd(value, value, sum);
  } else {
    return sum + value * value;
  }
}

template <typename T>
Sums sums_of(const T* values, int64_t count) {
  Vectors sums;
  Vectors squares;
  Vectors magnitudes;
  sums.fill(Wide(0.0));
  squares.fill(Wide(0.0));
  magnitudes.fill(Wide(0.0));
  int64_t i = 0;
  for (; i + kSumLanes <= count; i += kSumLanes) {
#pragma GCC unroll 4
    for (size_t v = 0; v < kVectors; ++v) {
      const Wide x =
          load_wide(values + i + static_cast<int64_t>(v) * kWideLanes);
      sums[v] = sums[v] + x;
      squares[v] = plus_square<T>(squares[v], x);
      magnitudes[v] = magnitudes[v] + x.abs();
    }
  }
  Lanes sum_lanes = lanes_of(sums);
  Lanes square_lanes = lanes_of(squares);
  Lanes magnitude_lanes = lanes_of(magnitudes);
  for (size_t lane = 0; i < count; ++i, ++lane) {
    const auto x = static_cast<double>(values[i]);
    sum_lanes[lane] += x;
    square_lanes[lane] += x * x;
    magnitude_lanes[lane] += std::abs(x);
  }
  return {sum_of(sum_lanes), sum_of(square_lanes), sum_of(magnitude_lanes)};
}

// The sums of the distances from a base, and of their squares.
template <typename T>
Sums sums_from(const T* values, int64_t count, double base) {
  Vectors sums;
  Vectors squares;
  sums.fill(Wide(0.0));
  squares.fill(Wide(0.0));
  const Wide from(base);
  int64_t i = 0;
  for (; i + kSumLanes <= count; i += kSumLanes) {
#pragma GCC unroll 4
    for (size_t v = 0; v < kVectors; ++v) {
      const Wide x =
          load_wide(values + i + static_cast<int64_t>(v) * kWideLanes) - from;
      sums[v] = sums[v] + x;
      squares[v] = squares[v] + x * x;
    }
  }
  Lanes sum_lanes = lanes_of(sums);
  Lanes square_lanes = lanes_of(squares);
  for (size_t lane = 0; i < count; ++i, ++lane) {
    const double x = static_cast<double>(values[i]) - base;
    sum_lanes[lane] += x;
    square_lanes[lane] += x * x;
  }
  return {sum_of(sum_lanes), sum_of(square_lanes)};
}

struct Extremes {
  double minimum;
  double maximum;
};

// The addition of 0 turns -0 into 0: which zero is found depends on the lanes.
Extremes extremes_of(const float* values, int64_t count) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  Vec high(kNone);
  Vec low(kNone);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Vec x = Vec::loadu(values + i);
    high = larger(high, x);
    low = larger(low, x.neg());
  }
  float maximum = max_across(high);
  float minimum = -max_across(low);
  for (; i < count; ++i) {
    maximum = std::max(maximum, values[i]);
    minimum = std::min(minimum, values[i]);
  }
  return {static_cast<double>(minimum) + 0.0,
          static_cast<double>(maximum) + 0.0};
}

Extremes extremes_of(const double* values, int64_t count) {
  Extremes found{values[0], values[0]};
  for (int64_t i = 1; i < count; ++i) {
    found.minimum = std::min(found.minimum, values[i]);
    found.maximum = std::max(found.maximum, values[i]);
  }
  return {found.minimum + 0.0, found.maximum + 0.0};
}

template <typename T>
Moments moments_of_block(const T* values, int64_t count) {
  Moments moments;
  if (count == 0) return moments;
  const auto n = static_cast<double>(count);
  const Sums sums = sums_of(values, count);
  const auto [minimum, maximum] = extremes_of(values, count);
  moments.count = count;
  moments.base = sums.values / n;
  moments.squares = sums.squares - sums.values * moments.base;
  moments.magnitudes = sums.magnitudes;
  moments.minimum = minimum;
  moments.maximum = maximum;
  if (moments.squares * kMostCancelled < sums.squares) {
    const Sums close = sums_from(values, count, moments.base);
    moments.offset = close.values / n;
    moments.squares =
        std::max(close.squares - close.values * moments.offset, 0.0);
  }
  return moments;
}

}  // namespace

void Moments::add(const Moments& other) {
  if (other.count == 0) return;
  if (count == 0) {
    *this = other;
    return;
  }
  const auto before = static_cast<double>(count);
  count += other.count;
  const double share =
      static_cast<double>(other.count) / static_cast<double>(count);
  const double distance = (other.base - base) + (other.offset - offset);
  offset += distance * share;
  squares += other.squares + distance * distance * before * share;
  magnitudes += other.magnitudes;
  minimum = std::min(minimum, other.minimum);
  maximum = std::max(maximum, other.maximum);
}

Moments moments_of(const float* values, int64_t count) {
  return moments_of_block(values, count);
}

Moments moments_of(const double* values, int64_t count) {
  return moments_of_block(values, count);
}

}  // namespace popsim::ops::observe
