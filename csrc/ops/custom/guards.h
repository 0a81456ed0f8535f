// Separate memory for each operand of a user's kernel, with guards on both
// sides, to find kernels that write outside their operands. It is for the
// user's tests, because it copies every operand.
#pragma once

#include <cstddef>
#include <vector>

#include "ops/custom/call.h"

namespace popsim::ops::custom {

class Guards {
 public:
  Guards(size_t num_inputs, std::vector<size_t> bytes);

  // Replaces the operands with copies.
  void put(Call& call, const std::vector<void*>& operands);
  // Copies the outputs back. Throws UserError with the operand before or after
  // which the kernel wrote, or with the input that it changed.
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
