// A Python function that a program calls in the middle of a run.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <utility>
#include <vector>

#include "ops/host_code.h"

namespace popsim::bindings {

// Takes the interpreter's lock, which a run goes without, for each call. To be
// made and destroyed with the lock held, around the run: nothing here outlives
// it, so no cycle of references goes through C++, where Python would not see
// it.
class PythonCode final : public ops::HostCode {
 public:
  // Called with number, gradient and a list of tensors; returns such a list.
  explicit PythonCode(pybind11::object function)
      : function_(std::move(function)) {}

  [[nodiscard]] std::vector<at::Tensor> call(
      int64_t number, bool gradient, std::vector<at::Tensor> operands) override;
  // Throws what the function raised, if it did.
  void rethrow() const {
    if (error_) throw *error_;
  }

 private:
  pybind11::object function_;
  std::optional<pybind11::error_already_set> error_;
};

}  // namespace popsim::bindings
