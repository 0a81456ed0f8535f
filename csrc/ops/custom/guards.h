// Memory of its own for each operand of a user's kernel, with guards on both
// sides: finds kernels that write where they may not. For the user's tests:
// every operand is copied.
#pragma once

#include <cstddef>
#include <vector>

#include "ops/custom/call.h"

namespace popsim::ops::custom {

class Guards {
 public:
  Guards(size_t num_inputs, std::vector<size_t> bytes);

  // Puts copies in the place of operands.
  void put(Call& call, const std::vector<void*>& operands);
  // Copies outputs to where they belong. Throws UserError with the operand
  // beside which something was written, or the input that was.
  void take(const std::vector<void*>& operands) const;

 private:
  [[nodiscard]] std::byte* data(size_t i) {
    return copies_[i].data() + kGuardBytes;
  }

  static constexpr size_t kGuardBytes = 4096;

  size_t num_inputs_;
  std::vector<size_t> bytes_;
  std::vector<std::vector<std::byte>> copies_;
};

}  // namespace popsim::ops::custom
