// The Python bindings of csrc/runtime.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace popsim::bindings {

void bind_runtime(pybind11::module_& m);

}  // namespace popsim::bindings
