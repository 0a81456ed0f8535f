#include "bindings/python_code.h"

#include <pybind11/stl.h>

#include "bindings/interpreter_lock.h"

namespace py = pybind11;

namespace popsim::bindings {

std::vector<at::Tensor> PythonCode::call(int64_t number, bool gradient,
                                         std::vector<at::Tensor> operands) {
  const Locked lock;
  try {
    // From here on only the list owns the tensors, so they are destroyed while
    // the lock is held.
    py::list given;
    for (at::Tensor& operand : operands) given.append(std::move(operand));
    return function_(number, gradient, given).cast<std::vector<at::Tensor>>();
  } catch (const py::error_already_set& error) {
    error_ = error;
  }
  throw ops::HostFailure("code of the host raised an exception");
}

}  // namespace popsim::bindings
