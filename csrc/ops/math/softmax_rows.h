// Softmax of one row, and its gradient.
#pragma once

#include <algorithm>
#include <limits>

#include "ops/math/vec_math.h"

namespace popsim::ops {

inline constexpr float kNothing = -std::numeric_limits<float>::infinity();

// It may miss a NaN: the sum of the exponentials is NaN in any case.
inline float largest(const float* x, int64_t size) {
  const Vec least(kNothing);
  Vec a = least;
  Vec b = least;
  int64_t i = 0;
  for (; i + 2 * kLanes <= size; i += 2 * kLanes) {
    a = larger(a, Vec::loadu(x + i));
    b = larger(b, Vec::loadu(x + i + kLanes));
  }
  for (; i < size; i += kLanes) {
    const int64_t lanes = std::min(kLanes, size - i);
    a = larger(a, keep(load(x + i, lanes), least, lanes));
  }
  return max_across(larger(a, b));
}

// Columns of floats, their rows `stride` apart.
template <typename T>
struct Strip {
  T* first;
  int64_t stride;

  [[nodiscard]] T* at(int64_t row) const { return first + row * stride; }
  [[nodiscard]] Strip from(int64_t column) const {
    return {first + column, stride};
  }
};

// kSafe: rows that contain only minus infinity, as after a mask that hides all
// positions, become zero instead of NaN.
template <bool kSafe>
struct Softmax {
  static void row(const float* x, float* out, int64_t size) {
    const Vec shift = finite(Vec(largest(x, size)));
    Vec sum(0.0f);
    for_each_vector(size, [&](int64_t i, auto n) {
      const Vec y = exp(load(x + i, n) - shift);
      sum = sum + keep(y, Vec(0.0f), n);
      store(y, out + i, n);
    });
    const Vec scale = inverse(Vec(sum_across(sum)));
    for_each_vector(size, [&](int64_t i, auto n) {
      store(load(out + i, n) * scale, out + i, n);
    });
  }

  // One vector of columns.
  template <typename Lanes>
  static void columns(Strip<const float> x, Strip<float> out, int64_t size,
                      const Vec& largest, Lanes n) {
    const Vec shift = finite(largest);
    Vec sum(0.0f);
    for (int64_t i = 0; i < size; ++i) {
      const Vec y = exp(load(x.at(i), n) - shift);
      sum = sum + y;
      store(y, out.at(i), n);
    }
    const Vec scale = inverse(sum);
    for (int64_t i = 0; i < size; ++i) {
      store(load(out.at(i), n) * scale, out.at(i), n);
    }
  }

 private:
  // Subtracting a finite number keeps minus infinity unchanged.
  static Vec finite(const Vec& shift) {
    if constexpr (!kSafe) return shift;
    return larger(shift, Vec(std::numeric_limits<float>::lowest()));
  }

  static Vec inverse(const Vec& sum) {
    const Vec inverse = Vec(1.0f) / sum;
    if constexpr (!kSafe) return inverse;
    return Vec::blendv(inverse, Vec(0.0f), sum == Vec(0.0f));
  }
};

struct SoftmaxGrad {
  static Vec summand(const Vec& g, const Vec& y) { return g * y; }
  static Vec result(const Vec& g, const Vec& y, const Vec& sum) {
    return (g - sum) * y;
  }
};

template <typename Function>
void grad_row(const float* g, const float* y, float* out, int64_t size) {
  Vec sums(0.0f);
  for_each_vector(size, [&](int64_t i, auto n) {
    sums = sums + Function::summand(load(g + i, n), load(y + i, n));
  });
  const Vec sum(sum_across(sums));
  for_each_vector(size, [&](int64_t i, auto n) {
    store(Function::result(load(g + i, n), load(y + i, n), sum), out + i, n);
  });
}

}  // namespace popsim::ops
