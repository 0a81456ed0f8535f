// Sums and extremes of float32 memory, in a fixed order.
#pragma once

#include <cstdint>
#include <string_view>

namespace popsim::ops {

struct ReduceFunctions {
  std::string_view name;
  float identity;
  // Computes one value from each of `num_runs` runs of `width` adjacent values;
  // the runs are `stride` apart.
  void (*runs)(const float* values, int64_t stride, int64_t num_runs,
               int64_t width, float* out);
  // Combines `num_rows` rows of `width` values, `stride` apart, into `out`.
  void (*rows)(const float* rows, int64_t stride, int64_t num_rows, float* out,
               int64_t width);
  float (*combine)(float a, float b);
};

// Returns nullptr unless the name is "sum", "amax" or "amin".
[[nodiscard]] const ReduceFunctions* find_reduce_functions(
    std::string_view name);

}  // namespace popsim::ops
