// Marks of Python's modules and tensors, to notice when these have changed.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace popsim::bindings {

void bind_host_watch(pybind11::module_& m);

}  // namespace popsim::bindings
