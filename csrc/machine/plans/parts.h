// The numbers of parts that a size may be divided into.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/numbers.h"

namespace popsim::machine {

// Those that change the size of the largest part.
[[nodiscard]] inline std::vector<int64_t> useful_parts(int64_t size,
                                                       int64_t most) {
  std::vector<int64_t> parts;
  const int64_t limit = std::min(size, most);
  for (int64_t count = 1; count <= limit;) {
    parts.push_back(count);
    const int64_t largest = ceil_div(size, count);
    if (largest == 1) break;
    // The smallest number of parts whose largest part is smaller.
    count = std::max(count + 1, ceil_div(size, largest - 1));
  }
  return parts;
}

// The fewest parts with the same largest part.
[[nodiscard]] inline int64_t fewest_parts(int64_t size, int64_t count) {
  return ceil_div(size, ceil_div(size, count));
}

// The parts of a field that can be best: as many as there are tiles, or a whole
// field, which needs no exchange of weights. Of a few elements all numbers are
// tried, as the unit does not take longer for each element more.
[[nodiscard]] inline std::vector<int64_t> field_parts(int64_t size,
                                                      int64_t most) {
  constexpr int64_t kFew = 18;  // three for each worker
  const int64_t fullest = fewest_parts(size, std::min(size, most));
  std::vector<int64_t> parts{1};
  for (int64_t largest = std::min(kFew, size - 1);
       largest > ceil_div(size, fullest); --largest) {
    const int64_t count = ceil_div(size, largest);
    if (count != parts.back()) parts.push_back(count);
  }
  if (fullest != parts.back()) parts.push_back(fullest);
  return parts;
}

// Of plans that are compared by cycles and by temporary memory, those that no
// other plan is as good as in both.
template <typename Plan>
class Frontier {
 public:
  void keep(const Plan& plan) {
    for (const Plan& other : plans_) {
      if (other.cycles <= plan.cycles &&
          other.temporary_bytes <= plan.temporary_bytes) {
        return;
      }
    }
    std::erase_if(plans_, [&](const Plan& other) {
      return other.cycles >= plan.cycles &&
             other.temporary_bytes >= plan.temporary_bytes;
    });
    plans_.push_back(plan);
  }

  // The fastest plan within `limit` bytes; if there is none, the smallest one.
  // PopLibs doubles the limit until a plan is found. With that, a lower limit
  // may take more memory, which nobody expects of it.
  [[nodiscard]] Plan best(double limit) const {
    const Plan* best = nullptr;
    for (const Plan& plan : plans_) {
      if (plan.temporary_bytes > limit) continue;
      if (best == nullptr || plan.cycles < best->cycles) best = &plan;
    }
    if (best != nullptr) return *best;
    return *std::ranges::min_element(
        plans_, {}, [](const Plan& plan) { return plan.temporary_bytes; });
  }

 private:
  std::vector<Plan> plans_;
};

}  // namespace popsim::machine
