// The tasks of a call, which several threads take one after the other.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <exception>
#include <limits>
#include <mutex>

#include "threads/float_mode.h"

namespace popsim::threads {

using TaskCall = void (*)(const void* body, int64_t i);

class Job {
 public:
  // Calls call(body, i) for each i < count. The tasks are in parts of
  // neighbours: one for each thread, at most kMaxParts. The floating-point mode
  // of the tasks is that of the thread that makes the job.
  Job(int64_t num_threads, int64_t count, TaskCall call, const void* body);
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  static constexpr int64_t kMaxParts = 16;
  [[nodiscard]] int64_t num_parts() const { return num_parts_; }

  // Does tasks until all have begun: those of one part, then those that are
  // left of the others. So, as far as threads come in time, each has the same
  // part in every call, with operands that are in its core's cache.
  void work(int64_t part);
  // Throws what the first of the tasks threw, by their numbers. Call it when
  // all tasks are done.
  void rethrow() const;

 private:
  struct alignas(64) Part {
    std::atomic<int64_t> next;
    int64_t end;
  };

  void work_on(Part& part);

  const int64_t num_parts_;
  const TaskCall call_;
  const void* const body_;
  const FloatMode mode_;
  // The first task that failed. Later ones do not begin.
  std::atomic<int64_t> failed_ = std::numeric_limits<int64_t>::max();
  std::mutex mutex_;  // for changes of failed_ and error_
  std::exception_ptr error_;
  std::array<Part, kMaxParts> parts_;
};

}  // namespace popsim::threads
