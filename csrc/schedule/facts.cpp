#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "schedule/action.h"

namespace popsim::schedule {

ActionList shortened(const Schedule& schedule) {
  ActionList actions;
  int64_t left_out = 0;
  for (const Stretch& stretch : schedule) {
    const int64_t times = std::min<int64_t>(stretch.times, 2);
    for (int64_t time = 0; time < times; ++time) {
      for (const Action& action : stretch.actions) {
        actions.push_back(further(action, time - left_out));
      }
    }
    left_out += stretch.times - times;
  }
  return actions;
}

std::vector<ActionList> times_of(const Stretch& stretch) {
  std::vector<ActionList> times;
  for (size_t i = 0; i < stretch.begins.size(); ++i) {
    const auto end = i + 1 < stretch.begins.size() ? stretch.begins[i + 1]
                                                   : stretch.actions.size();
    const auto first = stretch.actions.begin();
    times.emplace_back(first + static_cast<std::ptrdiff_t>(stretch.begins[i]),
                       first + static_cast<std::ptrdiff_t>(end));
  }
  return times;
}

int64_t max_in_flight(const Schedule& schedule) {
  // The first and last time step of each micro-batch, in a shortened schedule.
  std::map<int64_t, std::pair<int64_t, int64_t>> spans;
  int64_t now = 0;
  int64_t left_out = 0;
  for (const Stretch& stretch : schedule) {
    const std::vector<ActionList> times = times_of(stretch);
    const int64_t repeats = std::min<int64_t>(stretch.times, 2);
    for (int64_t repeat = 0; repeat < repeats; ++repeat) {
      for (const ActionList& actions : times) {
        for (const Action& action : actions) {
          if (action.kind == ActionKind::kUpdate) continue;
          const int64_t mb = action.micro_batch + repeat - left_out;
          spans.try_emplace(mb, now, now).first->second.second = now;
        }
        ++now;
      }
    }
    left_out += stretch.times - repeats;
  }
  std::vector<int64_t> changes(static_cast<size_t>(now) + 1);
  for (const auto& [mb, span] : spans) {
    ++changes[static_cast<size_t>(span.first)];
    --changes[static_cast<size_t>(span.second) + 1];
  }
  int64_t live = 0;
  int64_t most = 1;
  for (const int64_t change : changes) most = std::max(most, live += change);
  return most;
}

}  // namespace popsim::schedule
