#include "runtime/source.h"

#include <tuple>

#include "runtime/stop.h"

namespace popsim::runtime {

void Feed::begin_run(ops::Patience* patience, int64_t first) {
  patience_ = patience;
  if (held_.empty()) first_ = first * count_;
}

void Feed::end_run() {
  for (; !held_.empty(); held_.pop_front()) inlet_->release();
}

void Feed::take(int64_t index) { std::ignore = element(index, count_ - 1); }

std::span<void* const> Feed::element(int64_t index, int64_t which) {
  const int64_t number = index * count_ + which;
  std::unique_lock lock(mutex_);
  while (first_ + std::ssize(held_) <= number) {
    lock.unlock();
    const std::span<void* const> next = inlet_->acquire(*patience_);
    lock.lock();
    if (next.empty()) throw Stopped("run: stopped while waiting for data");
    held_.push_back(next);
  }
  return held_[static_cast<size_t>(number - first_)];
}

bool Feed::holds(int64_t index) {
  const std::lock_guard lock(mutex_);
  return first_ <= index * count_ &&
         (index + 1) * count_ <= first_ + std::ssize(held_);
}

void Feed::release_before(int64_t index) {
  const std::lock_guard lock(mutex_);
  for (; first_ < index * count_ && !held_.empty(); ++first_) {
    held_.pop_front();
    inlet_->release();
  }
}

}  // namespace popsim::runtime
