#include "runtime/timeline.h"

#include <algorithm>

#include "base/check.h"

namespace popsim::runtime {

using schedule::ActionKind;

namespace {

constexpr int64_t kMostActions = 10'000'000;

// The team of a replica: they are divided as evenly as possible.
int32_t team_of(const Plan& plan, int32_t replica) {
  const int32_t count = plan.replicas().count;
  int32_t team = 0;
  while ((team + 1) * count / plan.num_teams() <= replica) ++team;
  return team;
}

}  // namespace

Timeline::Timeline(const Plan& plan)
    : num_stages_(static_cast<size_t>(plan.graph().num_stages())),
      num_passes_(num_stages_ * (plan.training() ? 2 : 1)),
      accumulation_(plan.loop().gradient_accumulation) {
  const int32_t replicas = plan.replicas().count;
  const int64_t iterations = plan.loop().device_iterations;
  const int64_t micro_batches = iterations * accumulation_;
  const int64_t passes = static_cast<int64_t>(num_passes_) * replicas;
  check_user(micro_batches <= kMostActions / passes,
             "record_timeline: a run has ", micro_batches, " micro-batches on ",
             passes, " forward and backward stages, and a timeline holds ",
             kMostActions,
             " actions; record a run with fewer device iterations");
  const auto add = [&](ActionKind kind, int32_t replica, int32_t stage,
                       int32_t thread, int64_t count) {
    rows_.push_back({kind, replica, stage, thread,
                     std::vector<Span>(static_cast<size_t>(count))});
  };
  for (int32_t replica = 0; replica < replicas; ++replica) {
    for (size_t pass = 0; pass < num_passes_; ++pass) {
      const size_t stage = pass % num_stages_;
      const int32_t thread = team_of(plan, replica) * plan.num_lanes() +
                             plan.lane_of_stage()[stage];
      add(pass < num_stages_ ? ActionKind::kForward : ActionKind::kBackward,
          replica, static_cast<int32_t>(stage), thread, micro_batches);
    }
  }
  if (plan.training()) add(ActionKind::kUpdate, 0, 0, 0, iterations);
}

void Timeline::begin_run() {
  for (Row& row : rows_) std::ranges::fill(row.spans, Span{});
  complete_ = parallel_ = false;
  began_ = Clock::now();
}

size_t Timeline::row_of(const schedule::Action& action, int32_t replica) const {
  if (action.kind == ActionKind::kUpdate) return rows_.size() - 1;
  const size_t first = static_cast<size_t>(replica) * num_passes_;
  const bool backward = action.kind == ActionKind::kBackward;
  return first + (backward ? num_stages_ : 0) +
         static_cast<size_t>(action.stage);
}

void Timeline::note(const schedule::Action& action, int32_t replica,
                    int64_t index, Clock::time_point began) {
  if (action.kind == ActionKind::kUpdate) index /= accumulation_;
  rows_[row_of(action, replica)].spans[static_cast<size_t>(index)] = {
      began, Clock::now()};
}

void Timeline::end_run() {
  ended_ = Clock::now();
  complete_ = true;
}

double Timeline::since_begin(Clock::time_point time) const {
  return std::chrono::duration<double>(time - began_).count();
}

std::vector<ActionTime> Timeline::actions() const {
  std::vector<ActionTime> found;
  for (const Row& row : rows_) {
    for (size_t i = 0; i < row.spans.size(); ++i) {
      const Span& span = row.spans[i];
      if (span.end == Clock::time_point{}) continue;
      found.push_back({row.kind, row.replica, row.stage,
                       static_cast<int64_t>(i), since_begin(span.begin),
                       since_begin(span.end), parallel_ ? row.thread : 0});
    }
  }
  return found;
}

}  // namespace popsim::runtime
