// Memory whose content may go to disk.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "base/dtype.h"
#include "base/shape.h"

namespace popsim::feeds {

// A tensor in its own file in a folder. The file has no name and is deleted
// with the tensor. The space on the disk is reserved at once. Throws UserError
// if there is no space.
[[nodiscard]] at::Tensor tensor_on_disk(const std::string& folder,
                                        const Shape& shape, DType dtype);

}  // namespace popsim::feeds
