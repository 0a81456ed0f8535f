#include "ops/observe/moments.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <type_traits>

#include "ops/math/vec_math.h"
#include "ops/observe/blocks.h"

namespace popsim::ops::observe {
namespace {

using Wide = at::vec::Vectorized<double>;

constexpr int64_t kSumLanes = 16;
constexpr int64_t kWideLanes = Wide::size();
constexpr size_t kVectors = kSumLanes / kWideLanes;
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

double sum_of(Lanes& lanes) {
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

struct SumLanes {
  Lanes values;
  Lanes squares;
  Lanes magnitudes;

  // Adds fewer numbers than there are lanes.
  template <typename T>
  void add_rest(const T* numbers, int64_t count, double base) {
    for (size_t lane = 0; lane < static_cast<size_t>(count); ++lane) {
      const double x = static_cast<double>(numbers[lane]) - base;
      values[lane] += x;
      squares[lane] += x * x;
      magnitudes[lane] += std::abs(x);
    }
  }
  [[nodiscard]] Sums total() {
    return {sum_of(values), sum_of(squares), sum_of(magnitudes)};
  }
};

// The sums of some lanes, of numbers as they are. The square of a float32
// number is exact in float64, so a fused operation gives the same bits as two
// operations.
template <typename T>
struct PlainSums {
  Wide values{0.0};
  Wide squares{0.0};
  Wide magnitudes{0.0};

  void add(const Wide& x, const Wide& /*base*/) {
    values = values + x;
    if constexpr (std::is_same_v<T, float>) {
      squares = at::vec::fmadd(x, x, squares);
    } else {
      squares = squares + x * x;
    }
    magnitudes = magnitudes + x.abs();
  }
};

// Of distances from a base, without magnitudes.
struct CloseSums {
  Wide values{0.0};
  Wide squares{0.0};
  Wide magnitudes{0.0};

  void add(const Wide& number, const Wide& base) {
    const Wide x = number - base;
    values = values + x;
    squares = squares + x * x;
  }
};

// The sums of all lanes. They are members, not elements of an array, since
// compilers keep only these in registers.
template <typename Part, size_t kCount = kVectors>
struct AllSums {
  Part part;
  AllSums<Part, kCount - 1> others;

  template <typename T>
  void add(const T* numbers, const Wide& base) {
    part.add(load_wide(numbers), base);
    others.add(numbers + kWideLanes, base);
  }
  void store(SumLanes& lanes, size_t lane) const {
    part.values.store(lanes.values.data() + lane);
    part.squares.store(lanes.squares.data() + lane);
    part.magnitudes.store(lanes.magnitudes.data() + lane);
    others.store(lanes, lane + kWideLanes);
  }
};

template <typename Part>
struct AllSums<Part, 0> {
  template <typename T>
  void add(const T* /*numbers*/, const Wide& /*base*/) {}
  void store(SumLanes& /*lanes*/, size_t /*lane*/) const {}
};

template <typename Part, typename T>
Sums sums_of(const T* numbers, int64_t count, double base) {
  AllSums<Part> sums;
  const Wide wide_base(base);
  int64_t i = 0;
  for (; i + kSumLanes <= count; i += kSumLanes) {
    prefetch_next_block(numbers + i);
    sums.add(numbers + i, wide_base);
  }
  SumLanes lanes;
  sums.store(lanes, 0);
  lanes.add_rest(numbers + i, count - i, base);
  return lanes.total();
}

struct Extremes {
  double minimum;
  double maximum;
};

// The larger and the smaller of two finite numbers.
inline Vec greater_of(const Vec& a, const Vec& b) { return larger(a, b); }

inline Vec lesser_of(const Vec& a, const Vec& b) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_min_ps(a, b);
#elif defined(CPU_CAPABILITY_AVX2)
  return _mm256_min_ps(a, b);
#else
  return at::vec::minimum(a, b);
#endif
}

inline Wide greater_of(const Wide& a, const Wide& b) {
  return at::vec::maximum(a, b);
}

inline Wide lesser_of(const Wide& a, const Wide& b) {
  return at::vec::minimum(a, b);
}

// Extremes of several vectors side by side: each one waits for the last of its
// own.
template <typename Vector, typename T>
Extremes extremes_of(const T* values, int64_t count) {
  constexpr int64_t kSize = Vector::size();
  constexpr int64_t kAtOnce = 4 * kSize;
  Vector high[4] = {Vector(values[0]), Vector(values[0]), Vector(values[0]),
                    Vector(values[0])};
  Vector low[4] = {high[0], high[0], high[0], high[0]};
  int64_t i = 0;
  for (; i + kAtOnce <= count; i += kAtOnce) {
#pragma GCC unroll 4
    for (int64_t j = 0; j < 4; ++j) {
      const Vector x = Vector::loadu(values + i + j * kSize);
      high[j] = greater_of(high[j], x);
      low[j] = lesser_of(low[j], x);
    }
  }
  std::array<T, kSize> highs;
  std::array<T, kSize> lows;
  greater_of(greater_of(high[0], high[1]), greater_of(high[2], high[3]))
      .store(highs.data());
  lesser_of(lesser_of(low[0], low[1]), lesser_of(low[2], low[3]))
      .store(lows.data());
  T maximum = *std::ranges::max_element(highs);
  T minimum = *std::ranges::min_element(lows);
  for (; i < count; ++i) {
    maximum = std::max(maximum, values[i]);
    minimum = std::min(minimum, values[i]);
  }
  return {static_cast<double>(minimum), static_cast<double>(maximum)};
}

Extremes extremes_of(const float* values, int64_t count) {
  return extremes_of<Vec>(values, count);
}

Extremes extremes_of(const double* values, int64_t count) {
  return extremes_of<Wide>(values, count);
}

template <typename T>
Moments moments_of_block(const T* values, int64_t count) {
  Moments moments;
  if (count == 0) return moments;
  const auto n = static_cast<double>(count);
  const Sums sums = sums_of<PlainSums<T>>(values, count, 0.0);
  const auto [minimum, maximum] = extremes_of(values, count);
  moments.count = count;
  moments.base = sums.values / n;
  moments.squares = sums.squares - sums.values * moments.base;
  moments.magnitudes = sums.magnitudes;
  // 0 instead of -0: which zero was found depends on the number of lanes.
  moments.minimum = minimum + 0.0;
  moments.maximum = maximum + 0.0;
  if (moments.squares * kMostCancelled < sums.squares) {
    const Sums close = sums_of<CloseSums>(values, count, moments.base);
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
