// What the actions of an iteration print, in the order of the schedule.
#pragma once

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "threads/output.h"

namespace popsim::runtime {

// Several workers run actions at the same time, each in ascending order of
// their positions. A text is written as soon as all workers have come to its
// position.
template <typename Position>
class Texts {
 public:
  explicit Texts(size_t num_workers) : reached_(num_workers) {}

  // A worker has run an action: the text that this has printed.
  void add(size_t worker, const Position& position, std::string text) {
    const std::lock_guard lock(mutex_);
    reached_[worker] = position;
    if (!text.empty()) texts_.emplace(position, std::move(text));
    if (texts_.empty()) return;
    // Less than any position if a worker has run nothing.
    if (const auto all = *std::ranges::min_element(reached_)) write_until(*all);
  }
  // An action has failed. What comes after it is left out: on one thread it
  // would not have run.
  void fail(const Position& position) {
    const std::lock_guard lock(mutex_);
    if (!failed_ || position < *failed_) failed_ = position;
  }
  // All workers are done: writes the rest.
  void finish() {
    const std::lock_guard lock(mutex_);
    if (!texts_.empty()) write_until(texts_.rbegin()->first);
  }

 private:
  void write_until(Position last) {
    if (failed_) last = std::min(last, *failed_);
    const auto end = texts_.upper_bound(last);
    for (auto text = texts_.begin(); text != end; ++text) {
      threads::write(text->second);
    }
    texts_.erase(texts_.begin(), end);
  }

  std::vector<std::optional<Position>> reached_;  // by worker
  std::map<Position, std::string> texts_;
  std::optional<Position> failed_;
  std::mutex mutex_;
};

}  // namespace popsim::runtime
