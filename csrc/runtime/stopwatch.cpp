#include "runtime/stopwatch.h"

#include <algorithm>

namespace popsim::runtime {

void Stopwatch::after(const graph::Op& op, const ops::RunContext&) {
  const Clock::time_point now = Clock::now();
  Laps& laps = ops_[static_cast<size_t>(&op - graph_.ops().data())];
  laps.seconds += std::chrono::duration<double>(now - last_).count();
  ++laps.executions;
  last_ = now;
}

void Stopwatch::end_run() {
  for (Laps& laps : ops_) {
    laps.runs.push_back(laps.seconds);
    laps.seconds = 0;
  }
}

std::vector<OpTime> Stopwatch::times() {
  std::vector<OpTime> times;
  for (size_t i = 0; i < ops_.size(); ++i) {
    Laps& laps = ops_[i];
    if (laps.executions == 0) continue;
    const auto num_runs = static_cast<int64_t>(laps.runs.size());
    const auto middle = laps.runs.begin() + num_runs / 2;
    std::nth_element(laps.runs.begin(), middle, laps.runs.end());
    times.push_back(
        {static_cast<int64_t>(i), laps.executions / num_runs, *middle});
  }
  return times;
}

}  // namespace popsim::runtime
