#include "ops/recurrent/steps.h"

#include <algorithm>

namespace popsim::ops::recurrent {
namespace {

// Weights up to this size fit in a core's second-level cache.
constexpr size_t kCachedBytes = size_t{1} << 20;
// With fewer rows, reading the weights costs more than it is worth, cached or
// not.
constexpr int64_t kFewRows = 4;
constexpr int64_t kFewRowsUncached = 32;

// The work of a step, in multiplications.
int64_t step_work(int64_t batch, const Panels& panels) {
  return batch * static_cast<int64_t>(panels.bytes() / sizeof(float));
}

threads::Work rows_work(int64_t steps, int64_t batch, const Panels& panels) {
  const int64_t few =
      panels.bytes() <= kCachedBytes ? kFewRows : kFewRowsUncached;
  const int64_t worth =
      threads::multiplications(steps * step_work(batch, panels)).threads;
  return {std::min(worth, batch / few)};
}

}  // namespace

Split::Split(int64_t steps, int64_t batch, const Panels& panels)
    : all_rows_{0, batch},
      all_panels_{0, panels.count()},
      rows_(rows_work(steps, batch, panels), batch),
      panels_(threads::multiplications(step_work(batch, panels)),
              panels.count()) {}

bool Split::by_rows() const {
  const int64_t budget = threads::budget();
  return std::min(rows_.limit(), budget) >= std::min(panels_.limit(), budget);
}

}  // namespace popsim::ops::recurrent
