// A Python function that exchanges gradients with other processes during a run.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <span>

#include "ops/exchange.h"

namespace popsim::bindings {

// Takes the interpreter's lock for each exchange; python_code.h says how long
// it lives.
class PythonExchange final : public ops::Exchange {
 public:
  // The function is called without arguments, and adds up the numbers, a
  // contiguous float32 tensor on the CPU, over all processes.
  PythonExchange(at::Tensor numbers, pybind11::object function);

  [[nodiscard]] std::span<float> numbers() override;
  void sum() override;
  // Throws the exception that the function raised, if it raised one.
  void rethrow() const {
    if (error_) throw *error_;
  }

 private:
  at::Tensor numbers_;
  pybind11::object function_;
  std::optional<pybind11::error_already_set> error_;
};

}  // namespace popsim::bindings
