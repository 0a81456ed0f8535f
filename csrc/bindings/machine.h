// The model of the machine: what ops and programs cost on an IPU.
#pragma once

#include <pybind11/pybind11.h>

namespace popsim::bindings {

void bind_machine(pybind11::module_& m);

}  // namespace popsim::bindings
