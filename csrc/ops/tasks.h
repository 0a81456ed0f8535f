// Work cut into tasks when a kernel is prepared, so that results do not depend
// on the number of threads that happen to run them.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>

namespace popsim::ops {

// Elements read and written that are worth waking another thread for.
inline constexpr int64_t kMinTaskElements = 1 << 16;
inline constexpr int64_t kMaxTasks = 16;

// The number of tasks for `units` pieces of work that touch `elements`.
[[nodiscard]] inline int64_t num_tasks_for(int64_t elements, int64_t units) {
  return std::clamp<int64_t>(std::min(elements / kMinTaskElements, units), 1,
                             kMaxTasks);
}

struct TaskRange {
  int64_t begin;
  int64_t end;
};

[[nodiscard]] inline TaskRange task_range(int64_t task, int64_t num_tasks,
                                          int64_t units) {
  return {units * task / num_tasks, units * (task + 1) / num_tasks};
}

// Calls body(task) for each of the tasks, on several threads if there are
// several.
template <typename Body>
void run_tasks(int64_t num_tasks, const Body& body) {
  if (num_tasks == 1) {
    body(int64_t{0});
    return;
  }
  at::parallel_for(0, num_tasks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) body(task);
  });
}

}  // namespace popsim::ops
