// Work shared between threads. Only this folder uses OpenMP, to tell libraries
// how many threads they may use.
//
// Results must not depend on the number of threads, so there are two ways:
//   Tasks   the division depends only on the shape. A task may add up its
//           values; the sums of the tasks are then added in order.
//   Shares  each thread has one share, so the division depends on the budget.
//           The result of a unit must not depend on the other units of the
//           share.
#pragma once

#include <algorithm>
#include <cstdint>

#include "threads/budget.h"
#include "threads/job.h"
#include "threads/library_threads.h"
#include "threads/range.h"
#include "threads/work.h"

namespace popsim::threads {

// Calls call(body, i) for each i < count on at most `num_threads` threads: the
// calling one, and helpers as far as they are free (helpers.h). If calls throw,
// it throws the exception of the first of them by their numbers.
void run_on(int64_t num_threads, int64_t count, TaskCall call,
            const void* body);

// Calls body(i) for each i < count on at most `num_threads` threads.
template <typename Body>
void run_on(int64_t num_threads, int64_t count, const Body& body) {
  if (num_threads <= 1 || count <= 1) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  run_on(
      num_threads, count,
      [](const void* called, int64_t i) {
        (*static_cast<const Body*>(called))(i);
      },
      &body);
}

// Calls body() so that no code in it wakes another thread, for code of
// libraries whose results depend on the number of threads. Do not use it in one
// of several tasks: MKL's matrix factorisations are wrong there.
template <typename Body>
void run_alone(const Body& body) {
  const ScopedBudget alone(1);
  body();
}

// Calls body(), in which a library may use all threads of the budget, as far as
// it is worth it: for library code whose results do not depend on their number.
template <typename Body>
void run_shared(const Body& body) {
  if (!libraries_may_share()) return run_alone(body);
  body();
  libraries_have_shared();
}

class Tasks {
 public:
  static constexpr int64_t kMax = 16;

  Tasks() = default;
  // Makes several tasks for each thread that the work is worth, so that threads
  // wait little if the number of tasks is not a multiple of the number of
  // threads.
  Tasks(Work work, int64_t units)
      : units_(units),
        count_(work.threads == 1
                   ? 1
                   : std::clamp<int64_t>(
                         std::min(units, kTasksPerThread * work.threads), 1,
                         kMax)),
        threads_(std::min(work.threads, count_)) {}

  [[nodiscard]] int64_t count() const { return count_; }
  [[nodiscard]] Range units(int64_t task) const {
    return part(units_, task, count_);
  }
  // Calls body(task, units) for all tasks.
  template <typename Body>
  void run(const Body& body) const {
    run_on(std::min(threads_, count_ == 1 ? 1 : budget()), count_,
           [&](int64_t task) { body(task, units(task)); });
  }

 private:
  static constexpr int64_t kTasksPerThread = 4;

  int64_t units_ = 1;
  int64_t count_ = 1;
  int64_t threads_ = 1;
};

class Shares {
 public:
  Shares() : Shares({}, 1) {}
  Shares(Work work, int64_t units)
      : units_(units),
        limit_(std::clamp<int64_t>(std::min(work.threads, units), 1, most())) {}

  // The largest possible number of shares, for kernels that have memory for
  // each share.
  [[nodiscard]] int64_t limit() const { return limit_; }
  // Calls body(share, units) for all shares.
  template <typename Body>
  void run(const Body& body) const {
    const int64_t count = limit_ == 1 ? 1 : std::min(limit_, budget());
    run_on(count, count,
           [&](int64_t share) { body(share, part(units_, share, count)); });
  }

 private:
  int64_t units_;
  int64_t limit_;
};

}  // namespace popsim::threads
