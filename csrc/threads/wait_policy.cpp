#include "threads/wait_policy.h"

#include <cstdlib>
#include <string_view>

namespace popsim::threads {

bool may_spin() {
  static const bool may = [] {
    const char* policy = std::getenv("OMP_WAIT_POLICY");
    const std::string_view text = policy == nullptr ? "" : policy;
    return text != "PASSIVE" && text != "passive";
  }();
  return may;
}

}  // namespace popsim::threads
