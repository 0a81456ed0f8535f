// What the norms over rows share.
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

// Sum over a row of what function(i, lanes) gives, in four partial sums.
template <typename Function>
[[nodiscard]] float sum_over(int64_t count, const Function& function) {
  constexpr int64_t kStep = 4 * kLanes;
  constexpr std::integral_constant<int64_t, kLanes> kWhole;
  Vec a(0.0f);
  Vec b(0.0f);
  Vec c(0.0f);
  Vec d(0.0f);
  int64_t i = 0;
  for (; i + kStep <= count; i += kStep) {
    a = a + function(i, kWhole);
    b = b + function(i + kLanes, kWhole);
    c = c + function(i + 2 * kLanes, kWhole);
    d = d + function(i + 3 * kLanes, kWhole);
  }
  for (; i + kLanes <= count; i += kLanes) a = a + function(i, kWhole);
  if (i < count) b = b + keep(function(i, count - i), Vec(0.0f), count - i);
  return sum_across((a + b) + (c + d));
}

// Mean and 1 / sqrt(variance + epsilon) of a row.
[[nodiscard]] inline std::pair<float, float> row_moments(const float* x,
                                                         int64_t width,
                                                         float epsilon) {
  const auto count = static_cast<float>(width);
  const float mean =
      sum_over(width, [&](int64_t i, auto n) { return load(x + i, n); }) /
      count;
  const Vec center(mean);
  const float variance = sum_over(width,
                                  [&](int64_t i, auto n) {
                                    const Vec d = load(x + i, n) - center;
                                    return d * d;
                                  }) /
                         count;
  return {mean, 1.0f / std::sqrt(variance + epsilon)};
}

// The types that the lowering gave the outputs.
[[nodiscard]] inline std::vector<TensorType> given_types(const OpView& op) {
  std::vector<TensorType> types;
  for (size_t i = 0; i < op.num_outputs(); ++i) {
    if (op.op().outputs[i] == graph::kNoTensor) {
      types.push_back({});
    } else {
      types.push_back({op.output(i).dtype, op.output(i).shape});
    }
  }
  return types;
}

}  // namespace popsim::ops
