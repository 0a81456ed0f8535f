// The dtypes of the simulated device.
#pragma once

#include <cstdint>
#include <string_view>

namespace popsim {

enum class DType : int8_t {
  kBool,
  kUInt8,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
  kComplex64,  // two float32: the real part, then the imaginary part
};

[[nodiscard]] int64_t size_in_bytes(DType dtype);
[[nodiscard]] std::string_view name_of(DType dtype);
// Throws UserError for a name that is not a dtype.
[[nodiscard]] DType dtype_from_name(std::string_view name);
// Complex numbers do not count.
[[nodiscard]] bool is_floating(DType dtype);
[[nodiscard]] bool is_complex(DType dtype);
// Whether a number may be NaN or infinite: real and complex numbers.
[[nodiscard]] bool is_inexact(DType dtype);
// Whether memory of one dtype may be viewed as the other: complex numbers as
// pairs of real numbers, and pairs as complex numbers.
[[nodiscard]] bool can_view(DType memory, DType as);
// The number of bits of the significand. The dtype must be floating-point and
// no wider than float32.
[[nodiscard]] constexpr int significant_bits(DType dtype) {
  return dtype == DType::kFloat16 ? 11 : dtype == DType::kBFloat16 ? 8 : 24;
}

}  // namespace popsim
