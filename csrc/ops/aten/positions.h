// Positions that PyTorch follows without looking at them, or refuses without
// saying which.
#pragma once

#include <ATen/core/ivalue.h>

#include <string>
#include <vector>

namespace popsim::ops {

// Whether an operator does so, and what check_positions() looks at.
bool follows_positions(const std::string& name);

// Throws UserError if the operator would follow a position out of its tensors.
void check_positions(const std::string& name,
                     const std::vector<c10::IValue>& arguments);

// What to add to the message of an operator that has refused a position without
// saying which; empty for all others.
[[nodiscard]] std::string wrong_position(
    const std::string& name, const std::vector<c10::IValue>& arguments);

}  // namespace popsim::ops
