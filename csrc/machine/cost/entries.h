// The rules of the ops, file by file.
#pragma once

#include <span>
#include <string_view>

#include "machine/cost/cost.h"

namespace popsim::machine {

struct CostEntry {
  std::string_view kind;
  CostRule rule;
};

[[nodiscard]] std::span<const CostEntry> matmul_costs();
[[nodiscard]] std::span<const CostEntry> convolution_costs();

}  // namespace popsim::machine
