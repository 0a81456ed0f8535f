// Converts elements of any dtype to float32 and back, one sequence at a time.
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace popsim::ops {

// Reads `count` elements, `stride` elements apart, from `source + offset`.
using LoadFloats = void (*)(const void* source, int64_t offset, int64_t stride,
                            int64_t count, float* out);
// Writes `count` elements to `target + offset`: values[0..count), or values[0]
// for all of them if `uniform`. A bool is stored as value != 0.
using StoreFloats = void (*)(const float* values, bool uniform, void* target,
                             int64_t offset, int64_t count);

// Throw InternalError for a dtype without a conversion.
[[nodiscard]] LoadFloats load_floats(DType dtype);
[[nodiscard]] StoreFloats store_floats(DType dtype);

}  // namespace popsim::ops
