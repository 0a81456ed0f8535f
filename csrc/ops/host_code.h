// Code of the host that a program calls in the middle of a run.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "base/check.h"

namespace popsim::ops {

// A call of the host's code failed, and the code knows why. The run ends.
class HostFailure : public UserError {
 public:
  using UserError::UserError;
};

class HostCode {
 public:
  virtual ~HostCode() = default;
  // Returns the results of the call with this number; with `gradient`, of the
  // code that differentiates it. The operands are the code's to keep. Throws
  // HostFailure.
  [[nodiscard]] virtual std::vector<at::Tensor> call(
      int64_t number, bool gradient, std::vector<at::Tensor> operands) = 0;
};

}  // namespace popsim::ops
