// What Python's modules and tensors are like, to notice that they have changed.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace popsim::bindings {

void bind_host_watch(pybind11::module_& m);

}  // namespace popsim::bindings
