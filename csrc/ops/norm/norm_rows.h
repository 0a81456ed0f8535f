// The common code of the norms over rows.
#pragma once

#include <cmath>
#include <optional>
#include <utility>

#include "ops/math/vec_math.h"
#include "ops/operands/rows.h"

namespace popsim::ops {

[[nodiscard]] inline std::optional<RowInput> optional_row(const OpView& op,
                                                          size_t input,
                                                          int64_t width) {
  if (!op.has_input(input)) return std::nullopt;
  return RowInput(op, input, width);
}

[[nodiscard]] inline std::optional<RowOutput> optional_output(const OpView& op,
                                                              size_t output,
                                                              int64_t width) {
  if (op.op().outputs[output] == graph::kNoTensor) return std::nullopt;
  return RowOutput(op, output, width);
}

// Sum over a row, in four partial sums: add(sum, i, lanes) returns the sum plus
// the terms of one vector.
template <typename Add>
[[nodiscard]] float sum_over(int64_t count, const Add& add) {
  constexpr int64_t kStep = 4 * kLanes;
  constexpr std::integral_constant<int64_t, kLanes> kWhole;
  Vec a(0.0f);
  Vec b(0.0f);
  Vec c(0.0f);
  Vec d(0.0f);
  int64_t i = 0;
  for (; i + kStep <= count; i += kStep) {
    a = add(a, i, kWhole);
    b = add(b, i + kLanes, kWhole);
    c = add(c, i + 2 * kLanes, kWhole);
    d = add(d, i + 3 * kLanes, kWhole);
  }
  for (; i + kLanes <= count; i += kLanes) a = add(a, i, kWhole);
  if (i < count) b = keep(add(b, i, count - i), b, count - i);
  return sum_across((a + b) + (c + d));
}

// Mean and 1 / sqrt(variance + epsilon) of a row.
[[nodiscard]] inline std::pair<float, float> row_moments(const float* x,
                                                         int64_t width,
                                                         float epsilon) {
  const auto count = static_cast<float>(width);
  const float sum = sum_over(width, [&](const Vec& before, int64_t i, auto n) {
    return before + load(x + i, n);
  });
  const float mean = sum / count;
  const Vec center(mean);
  const float squares =
      sum_over(width, [&](const Vec& before, int64_t i, auto n) {
        const Vec deviation = load(x + i, n) - center;
        return at::vec::fmadd(deviation, deviation, before);
      });
  return {mean, 1.0f / std::sqrt(squares / count + epsilon)};
}

}  // namespace popsim::ops
