// Prints tensors as a program on the device does.
#pragma once

#include <complex>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/shape.h"

namespace popsim::ops {

enum class FloatFormat : int8_t { kAuto, kFixed, kScientific, kNone };

// Throws InternalError for a name that is not a format.
[[nodiscard]] FloatFormat float_format_from_name(std::string_view name);

struct PrintOptions {
  std::string title;                   // empty: no title
  int64_t summarise_threshold = 1000;  // elements; 0: never
  int64_t edge_items = 3;
  int64_t max_line_width = 80;  // characters; 0: no limit
  int64_t digits = 4;           // of the largest element; 0: as many as needed
  FloatFormat float_format = FloatFormat::kAuto;
  std::string separator = ",";
  std::string open_bracket = "(";
  std::string close_bracket = ")";
  bool is_float64 = false;  // else the values are float32 or narrower
};

// `values` in row-major order. The text ends with a newline.
[[nodiscard]] std::string format_tensor(std::span<const double> values,
                                        const Shape& shape,
                                        const PrintOptions& options);
[[nodiscard]] std::string format_tensor(std::span<const int64_t> values,
                                        const Shape& shape,
                                        const PrintOptions& options);
// Each number as in Python: 1.5-2.0j.
[[nodiscard]] std::string format_tensor(
    std::span<const std::complex<double>> values, const Shape& shape,
    const PrintOptions& options);

}  // namespace popsim::ops
