// How products are divided over tiles.
#pragma once

#include <pybind11/pybind11.h>

namespace popsim::bindings {

void bind_machine_plans(pybind11::module_& m);

}  // namespace popsim::bindings
