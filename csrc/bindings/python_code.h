// A Python function that a program calls during a run.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <utility>
#include <vector>

#include "ops/host_code.h"

namespace popsim::bindings {

// Takes the interpreter's lock for each call; the run itself does not hold the
// lock. Make and destroy this object around the run, with the lock held. No
// object here outlives the run, so no cycle of references passes through C++,
// where Python's garbage collector could not find it.
class PythonCode final : public ops::HostCode {
 public:
  // The function is called with a number, a gradient flag and a list of
  // tensors; it returns a list of tensors.
  explicit PythonCode(pybind11::object function)
      : function_(std::move(function)) {}

  [[nodiscard]] std::vector<at::Tensor> call(
      int64_t number, bool gradient, std::vector<at::Tensor> operands) override;
  // Throws the exception that the function raised, if it raised one.
  void rethrow() const {
    if (error_) throw *error_;
  }

 private:
  pybind11::object function_;
  std::optional<pybind11::error_already_set> error_;
};

}  // namespace popsim::bindings
