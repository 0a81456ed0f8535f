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
};

[[nodiscard]] int64_t size_in_bytes(DType dtype);
[[nodiscard]] std::string_view name_of(DType dtype);
// Throws UserError for a name that is not a dtype.
[[nodiscard]] DType dtype_from_name(std::string_view name);
[[nodiscard]] bool is_floating(DType dtype);
// The number of bits of the significand. The dtype must be floating-point and
// no wider than float32.
[[nodiscard]] constexpr int significant_bits(DType dtype) {
  return dtype == DType::kFloat16 ? 11 : dtype == DType::kBFloat16 ? 8 : 24;
}

}  // namespace popsim
