#include "ops/operands/number.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <limits>
#include <type_traits>

#include "base/check.h"

namespace popsim::ops {
namespace {

struct TruthByte {
  uint8_t value;
};

template <typename T>
double read_one(const void* source) {
  if constexpr (std::is_same_v<T, TruthByte>) {
    return static_cast<const TruthByte*>(source)->value != 0 ? 1.0 : 0.0;
  } else {
    return static_cast<double>(*static_cast<const T*>(source));
  }
}

template <typename T>
void write_one(double value, void* target) {
  if constexpr (std::is_same_v<T, TruthByte>) {
    static_cast<TruthByte*>(target)->value = value != 0 ? 1 : 0;
  } else if constexpr (std::is_integral_v<T>) {
    // A value that the dtype does not have would be undefined.
    using Limits = std::numeric_limits<T>;
    const bool fits = value >= static_cast<double>(Limits::min()) &&
                      value < -static_cast<double>(Limits::min());
    *static_cast<T*>(target) = fits ? static_cast<T>(value) : Limits::min();
  } else {
    *static_cast<T*>(target) = static_cast<T>(value);
  }
}

}  // namespace

ReadNumber read_number(DType dtype) {
  switch (dtype) {
    case DType::kBool:
      return read_one<TruthByte>;
    case DType::kUInt8:
      return read_one<uint8_t>;
    case DType::kInt8:
      return read_one<int8_t>;
    case DType::kInt16:
      return read_one<int16_t>;
    case DType::kInt32:
      return read_one<int32_t>;
    case DType::kInt64:
      return read_one<int64_t>;
    case DType::kFloat16:
      return read_one<at::Half>;
    case DType::kBFloat16:
      return read_one<at::BFloat16>;
    case DType::kFloat32:
      return read_one<float>;
    case DType::kFloat64:
      return read_one<double>;
    case DType::kComplex64:
      break;
  }
  throw InternalError(join(name_of(dtype), " is not one real number"));
}

WriteNumber write_number(DType dtype) {
  switch (dtype) {
    case DType::kBool:
      return write_one<TruthByte>;
    case DType::kInt32:
      return write_one<int32_t>;
    case DType::kInt64:
      return write_one<int64_t>;
    case DType::kFloat16:
      return write_one<at::Half>;
    case DType::kFloat32:
      return write_one<float>;
    case DType::kFloat64:
      return write_one<double>;
    case DType::kUInt8:
    case DType::kInt8:
    case DType::kInt16:
    case DType::kBFloat16:
    case DType::kComplex64:
      break;
  }
  throw InternalError(join("numbers cannot be stored as ", name_of(dtype)));
}

}  // namespace popsim::ops
