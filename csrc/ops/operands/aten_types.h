// The device's dtypes as ATen's.
#pragma once

#include <c10/core/ScalarType.h>

#include "base/dtype.h"

namespace popsim::ops {

[[nodiscard]] at::ScalarType to_scalar_type(DType dtype);
// Throws UserError if the device does not have the dtype.
[[nodiscard]] DType from_scalar_type(at::ScalarType type);

}  // namespace popsim::ops
