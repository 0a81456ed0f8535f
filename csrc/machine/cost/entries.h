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

[[nodiscard]] std::span<const CostEntry> elementwise_costs();
[[nodiscard]] std::span<const CostEntry> reduction_costs();
[[nodiscard]] std::span<const CostEntry> layout_costs();
[[nodiscard]] std::span<const CostEntry> update_costs();
[[nodiscard]] std::span<const CostEntry> pool_costs();
[[nodiscard]] std::span<const CostEntry> other_costs();
[[nodiscard]] std::span<const CostEntry> matmul_costs();
[[nodiscard]] std::span<const CostEntry> convolution_costs();
[[nodiscard]] std::span<const CostEntry> recurrent_costs();

}  // namespace popsim::machine
