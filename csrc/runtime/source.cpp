#include "runtime/source.h"

#include "runtime/stop.h"

namespace popsim::runtime {

void Feed::begin_run(ops::Patience* patience) {
  patience_ = patience;
  first_ = 0;
}

void Feed::end_run() {
  for (; !held_.empty(); held_.pop_front()) inlet_->release();
}

std::span<void* const> Feed::element(int64_t index) {
  std::unique_lock lock(mutex_);
  while (first_ + std::ssize(held_) <= index) {
    lock.unlock();
    const std::span<void* const> next = inlet_->acquire(*patience_);
    lock.lock();
    if (next.empty()) throw Stopped("run: stopped while waiting for data");
    held_.push_back(next);
  }
  return held_[static_cast<size_t>(index - first_)];
}

void Feed::release_before(int64_t index) {
  const std::lock_guard lock(mutex_);
  for (; first_ < index && !held_.empty(); ++first_) {
    held_.pop_front();
    inlet_->release();
  }
}

}  // namespace popsim::runtime
