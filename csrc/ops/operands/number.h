// Reads and writes one number of any dtype, in float64.
#pragma once

#include "base/dtype.h"

namespace popsim::ops {

using ReadNumber = double (*)(const void* source);
// An integer is rounded toward 0; a bool is stored as value != 0.
using WriteNumber = void (*)(double value, void* target);

[[nodiscard]] ReadNumber read_number(DType dtype);
[[nodiscard]] WriteNumber write_number(DType dtype);

}  // namespace popsim::ops
