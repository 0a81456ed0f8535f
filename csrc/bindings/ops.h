// The table of ops, and the properties of each op.
#pragma once

#include <pybind11/pybind11.h>

namespace popsim::bindings {

void bind_ops(pybind11::module_& m);

}  // namespace popsim::bindings
