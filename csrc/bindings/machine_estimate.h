// Estimates of whole programs.
#pragma once

#include <pybind11/pybind11.h>

namespace popsim::bindings {

void bind_machine_estimate(pybind11::module_& m);

}  // namespace popsim::bindings
