#include "ops/operands/float_conversion.h"

#include <ATen/cpu/vec/vec.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <type_traits>

#include "base/check.h"

namespace popsim::ops {
namespace {

// Reading a boolean as C++ bool would be undefined for values other than 0 and
// 1.
using BoolByte = std::byte;

template <typename T>
float to_float(T value) {
  if constexpr (std::is_same_v<T, BoolByte>) {
    return value != BoolByte{} ? 1.0f : 0.0f;
  } else {
    return static_cast<float>(value);
  }
}

template <typename T>
T from_float(float value) {
  if constexpr (std::is_same_v<T, BoolByte>) {
    return value != 0.0f ? BoolByte{1} : BoolByte{0};
  } else {
    return static_cast<T>(value);
  }
}

auto widened(const at::vec::Vectorized<at::Half>& values) {
  return at::vec::convert_half_float(values);
}

auto widened(const at::vec::Vectorized<at::BFloat16>& values) {
  return at::vec::convert_bfloat16_float(values);
}

// Written by hand, because the compiler does not vectorise conversions of
// 16-bit floats.
template <typename T>
void load_run_16bit(const T* source, int64_t count, float* out) {
  using at::vec::Vectorized;
  constexpr int64_t kLanes = Vectorized<float>::size();
  int64_t i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
    const auto [low, high] = widened(Vectorized<T>::loadu(source + i));
    low.store(out + i);
    high.store(out + i + kLanes);
  }
  for (; i < count; i += kLanes) {
    const int64_t lanes = std::min(kLanes, count - i);
    at::vec::convert<float>(Vectorized<T>::loadu(source + i, lanes))
        .store(out + i, lanes);
  }
}

template <typename T>
void load_run(const T* source, int64_t count, float* out) {
  if constexpr (std::is_same_v<T, float>) {
    std::memcpy(out, source, static_cast<size_t>(count) * sizeof(float));
  } else if constexpr (std::is_same_v<T, at::Half> ||
                       std::is_same_v<T, at::BFloat16>) {
    load_run_16bit(source, count, out);
  } else {
    for (int64_t i = 0; i < count; ++i) out[i] = to_float(source[i]);
  }
}

template <typename T>
void load(const void* source, int64_t offset, int64_t stride, int64_t count,
          float* out) {
  const T* first = static_cast<const T*>(source) + offset;
  if (stride == 1) {
    load_run(first, count, out);
  } else if (stride == 0) {
    std::fill_n(out, count, to_float(*first));
  } else {
    for (int64_t i = 0; i < count; ++i) out[i] = to_float(first[i * stride]);
  }
}

template <typename T>
void store(const float* values, bool uniform, void* target, int64_t offset,
           int64_t count) {
  T* first = static_cast<T*>(target) + offset;
  if (uniform) {
    std::fill_n(first, count, from_float<T>(*values));
  } else if constexpr (std::is_same_v<T, float>) {
    std::memmove(first, values, static_cast<size_t>(count) * sizeof(float));
  } else if constexpr (std::is_same_v<T, at::Half> ||
                       std::is_same_v<T, at::BFloat16>) {
    at::vec::convert(values, first, count);
  } else {
    for (int64_t i = 0; i < count; ++i) first[i] = from_float<T>(values[i]);
  }
}

}  // namespace

LoadFloats load_floats(DType dtype) {
  switch (dtype) {
    case DType::kBool:
      return load<BoolByte>;
    case DType::kUInt8:
      return load<uint8_t>;
    case DType::kInt8:
      return load<int8_t>;
    case DType::kInt16:
      return load<int16_t>;
    case DType::kInt32:
      return load<int32_t>;
    case DType::kInt64:
      return load<int64_t>;
    case DType::kFloat16:
      return load<at::Half>;
    case DType::kBFloat16:
      return load<at::BFloat16>;
    case DType::kFloat32:
      return load<float>;
    case DType::kFloat64:
      return load<double>;
    case DType::kComplex64:
      break;
  }
  throw InternalError("load_floats: not a floating-point dtype");
}

StoreFloats store_floats(DType dtype) {
  switch (dtype) {
    case DType::kBool:
      return store<BoolByte>;
    case DType::kFloat16:
      return store<at::Half>;
    case DType::kBFloat16:
      return store<at::BFloat16>;
    case DType::kFloat32:
      return store<float>;
    case DType::kUInt8:
    case DType::kInt8:
    case DType::kInt16:
    case DType::kInt32:
    case DType::kInt64:
    case DType::kFloat64:
    case DType::kComplex64:
      break;
  }
  throw InternalError(join("float32 values cannot be stored as ",
                           name_of(dtype), " by an elementwise codelet"));
}

}  // namespace popsim::ops
