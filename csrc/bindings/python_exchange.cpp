#include "bindings/python_exchange.h"

#include <utility>

#include "base/check.h"
#include "bindings/interpreter_lock.h"
#include "ops/host_code.h"

namespace py = pybind11;

namespace popsim::bindings {

PythonExchange::PythonExchange(at::Tensor numbers, py::object function)
    : numbers_(std::move(numbers)), function_(std::move(function)) {
  check_user(numbers_.scalar_type() == at::kFloat && numbers_.is_contiguous() &&
                 numbers_.device().is_cpu(),
             "run: the numbers of an exchange must be a contiguous float32 "
             "tensor on the CPU");
}

std::span<float> PythonExchange::numbers() {
  return {numbers_.mutable_data_ptr<float>(),
          static_cast<size_t>(numbers_.numel())};
}

void PythonExchange::sum() {
  const Locked lock;
  try {
    function_();
    return;
  } catch (const py::error_already_set& error) {
    error_ = error;
  }
  throw ops::HostFailure(
      "the exchange with other processes raised an exception");
}

}  // namespace popsim::bindings
