// Code of the host that a program calls during a run.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "base/check.h"

namespace popsim::ops {

// Thrown if a call of the host's code failed; the host's code keeps the reason.
// The run ends.
class HostFailure : public UserError {
 public:
  using UserError::UserError;
};

class HostCode {
 public:
  virtual ~HostCode() = default;
  // Returns the results of the call with this number; with `gradient`, those of
  // the code that computes its gradients. The code owns the operands after the
  // call. Throws HostFailure.
  [[nodiscard]] virtual std::vector<at::Tensor> call(
      int64_t number, bool gradient, std::vector<at::Tensor> operands) = 0;
};

}  // namespace popsim::ops
