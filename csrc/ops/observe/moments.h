// Count, mean, sum of squared distances, sum of magnitudes and extremes of
// finite numbers, in float64.
//
// Sums go over sixteen lanes, whatever the vectors of the processor, so all
// processors give the same bits.
#pragma once

#include <cstdint>
#include <limits>

namespace popsim::ops::observe {

struct Moments {
  int64_t count = 0;
  // The mean is base + offset: of numbers close to each other, the offset has
  // digits that the mean has no room for.
  double base = 0.0;
  double offset = 0.0;
  double squares = 0.0;  // the sum of squared distances from the mean
  double magnitudes = 0.0;
  double minimum = std::numeric_limits<double>::infinity();
  double maximum = -std::numeric_limits<double>::infinity();

  [[nodiscard]] double mean() const { return base + offset; }
  // Adds the moments of further numbers (Chan, Golub, LeVeque 1979).
  void add(const Moments& other);
};

// The moments of finite numbers, at most a block of them. If a number is not
// finite, neither is the sum of squares, and the others mean nothing.
[[nodiscard]] Moments moments_of(const float* values, int64_t count);
[[nodiscard]] Moments moments_of(const double* values, int64_t count);

}  // namespace popsim::ops::observe
