#include "ops/recurrent/steps.h"

namespace popsim::ops::recurrent {
namespace {

// Arithmetic that is worth waking a thread for.
constexpr double kTaskFlops = 1 << 19;
// Weights up to this size stay in a core's second cache.
constexpr size_t kCachedBytes = size_t{1} << 20;
// Fewer rows do not pay for reading the weights, cached or not.
constexpr int64_t kFewRows = 4;
constexpr int64_t kFewRowsUncached = 32;

}  // namespace

Split plan_split(int64_t steps, int64_t batch, const Panels& panels) {
  const auto threads = static_cast<int64_t>(at::get_num_threads());
  const double weights = static_cast<double>(panels.bytes()) / sizeof(float);
  const double step_flops = 2.0 * static_cast<double>(batch) * weights;
  const auto worth = [&](double flops) {
    const auto most = static_cast<double>(threads);
    return static_cast<int64_t>(std::clamp(flops / kTaskFlops, 1.0, most));
  };
  const bool cached = panels.bytes() <= kCachedBytes;
  const int64_t by_rows =
      std::min(worth(step_flops * static_cast<double>(steps)),
               batch / (cached ? kFewRows : kFewRowsUncached));
  const int64_t by_units = std::min(worth(step_flops), panels.count());
  if (by_rows >= std::max<int64_t>(by_units, 2)) return {by_rows, true};
  return {std::max<int64_t>(by_units, 1), false};
}

}  // namespace popsim::ops::recurrent
