// Positions that PyTorch uses without a check, or refuses without saying which
// one.
#pragma once

#include <ATen/core/ivalue.h>

#include <string>
#include <vector>

namespace popsim::ops {

// Whether an operator uses positions without a check, so that check_positions()
// must check them.
bool follows_positions(const std::string& name);

// Throws UserError if a position would make the operator access memory outside
// its tensors.
void check_positions(const std::string& name,
                     const std::vector<c10::IValue>& arguments);

// The text to add to the message of an operator that refused a position without
// saying which one; empty for all other operators.
[[nodiscard]] std::string wrong_position(
    const std::string& name, const std::vector<c10::IValue>& arguments);

}  // namespace popsim::ops
