// Processes the blocks of a map codelet's plan on one thread.
#pragma once

#include <array>
#include <vector>

#include "ops/map/plan.h"

namespace popsim::ops {

class MapRunner {
 public:
  explicit MapRunner(const MapPlan& plan);

  // `plan` must be the plan that the runner was made for.
  void run(const MapPlan& plan, const RunContext& context, int64_t first_block,
           int64_t last_block);

 private:
  static constexpr int64_t kLineFloats = 16;
  struct alignas(64) Line {
    std::array<float, kLineFloats> floats;
  };

  void run_block(const MapPlan& plan, const RunContext& context,
                 MapBlock block);

  std::vector<Line> slots_;
  std::vector<float> singles_;  // by value, for values that are one float
  std::vector<float*> values_;  // by value: its address
};

}  // namespace popsim::ops
