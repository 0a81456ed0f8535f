// Quotients of integers that end the process: the processor raises a signal for
// the least number divided by -1.
#pragma once

#include <ATen/core/ivalue.h>

#include <string>
#include <vector>

namespace popsim::ops {

// Whether an operator may divide the least integer by -1, so that
// check_quotients() must check its arguments.
bool may_overflow_quotients(const std::string& name);

// Throws UserError if an operator would divide the least integer by -1.
void check_quotients(const std::string& name,
                     const std::vector<c10::IValue>& arguments);

}  // namespace popsim::ops
