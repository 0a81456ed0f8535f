// The checks of a run for NaN and infinity, and the error of one that fails.
#pragma once

#include <atomic>
#include <cstddef>
#include <string>
#include <vector>

#include "base/check.h"

namespace popsim::ops {

// A tensor that the program checks has NaN or an infinity.
class BadNumber : public UserError {
 public:
  using UserError::UserError;
};

// What the checks of a device iteration share.
struct NumberChecks {
  struct Copy {
    void* memory;
    std::vector<std::byte> bytes;
  };

  bool on = true;
  // What the update is about to change, if it may fail with finite gradients.
  std::vector<Copy> copies;
  // The name of a bad tensor, for the next check that may fail; null: none.
  std::atomic<const std::string*> noticed = nullptr;
};

}  // namespace popsim::ops
