// Cycles of elementwise work, per tile.
//
// PopLibs, popops/PerformanceEstimation and popopsCycleEstimators.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "machine/op_cost.h"

namespace popsim::machine {

// A loop over vectors: `cycles` treat `elements`; `overhead` is paid once by
// each worker.
struct VectorLoop {
  double cycles = 3;
  int64_t elements = 2;
  double overhead = 29;
  bool unary = false;
  Grade grade = Grade::kPublished;

  [[nodiscard]] double rate() const {
    return cycles / static_cast<double>(elements);
  }
};

// The loop of an instruction of `map`; empty for an unknown one. `scalar`: one
// operand is a number.
[[nodiscard]] std::optional<VectorLoop> instruction_loop(std::string_view name,
                                                         bool half,
                                                         bool scalar);
// The loop of a pass that adds or multiplies whole tensors: c cycles treat a
// vector of 8 bytes.
[[nodiscard]] VectorLoop pass(double cycles, bool half);

// `elements` are those of the fullest tile.
[[nodiscard]] OpCost elementwise(int64_t elements, const VectorLoop& loop);
[[nodiscard]] OpCost cast(int64_t elements, bool of_integers);
[[nodiscard]] OpCost fill(int64_t elements, bool half);
[[nodiscard]] OpCost random_numbers(int64_t elements, double cycles, bool half);

}  // namespace popsim::machine
