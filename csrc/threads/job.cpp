#include "threads/job.h"

#include <algorithm>

#include "threads/range.h"

namespace popsim::threads {

Job::Job(int64_t num_threads, int64_t count, TaskCall call, const void* body)
    : num_parts_(
          std::clamp<int64_t>(std::min(num_threads, count), 1, kMaxParts)),
      call_(call),
      body_(body) {
  for (int64_t i = 0; i < num_parts_; ++i) {
    const Range tasks = part(count, i, num_parts_);
    Part& made = parts_[static_cast<size_t>(i)];
    made.next.store(tasks.begin, std::memory_order_relaxed);
    made.end = tasks.end;
  }
}

void Job::work(int64_t part) {
  mode_.apply();
  for (int64_t i = 0; i < num_parts_; ++i) {
    work_on(parts_[static_cast<size_t>((part + i) % num_parts_)]);
  }
}

void Job::work_on(Part& part) {
  // Looks first: the counter of a part that is done need not change hands.
  while (part.next.load(std::memory_order_relaxed) < part.end) {
    const int64_t task = part.next.fetch_add(1, std::memory_order_relaxed);
    if (task >= part.end) return;
    if (task > failed_.load(std::memory_order_relaxed)) continue;
    try {
      call_(body_, task);
    } catch (...) {
      const std::lock_guard lock(mutex_);
      if (task > failed_) continue;
      failed_ = task;
      error_ = std::current_exception();
    }
  }
}

void Job::rethrow() const {
  if (error_) std::rethrow_exception(error_);
}

}  // namespace popsim::threads
