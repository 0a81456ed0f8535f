// Memory whose content may go to disk.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "base/dtype.h"
#include "base/shape.h"

namespace popsim::feeds {

// A tensor in a file of its own in a folder, which has no name and is gone with
// the tensor. The disk has room for it from the start. Throws UserError where
// there is none.
[[nodiscard]] at::Tensor tensor_on_disk(const std::string& folder,
                                        const Shape& shape, DType dtype);

}  // namespace popsim::feeds
