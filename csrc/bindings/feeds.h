// The Python bindings of csrc/feeds.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace popsim::bindings {

void bind_feeds(pybind11::module_& m);

}  // namespace popsim::bindings
