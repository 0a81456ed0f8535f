#include "threads/tasks.h"

#if defined(_OPENMP)
#include <pthread.h>

#include <type_traits>

#include "threads/helpers.h"
#include "threads/library_threads.h"
#endif

namespace popsim::threads {

#if defined(_OPENMP)

namespace {

// Those of the process. Their threads may still wait when the process ends, so
// nothing is destroyed.
Helpers& helpers() {
  static_assert(std::is_trivially_destructible_v<Helpers>);
  static constinit Helpers shared(use_one_thread);
  static const int forgets_after_fork = pthread_atfork(nullptr, nullptr, [] {
    shared.forget();
    forget_library_threads();
  });
  static_cast<void>(forgets_after_fork);
  return shared;
}

}  // namespace

void run_on(int64_t num_threads, int64_t count, TaskCall call,
            const void* body) {
  // A task shares its work with nobody, and neither do libraries that it calls.
  const ScopedBudget alone(1);
  Job job(num_threads, count, call, body);
  Helpers& own = helpers();
  if (library_threads_are_awake()) {
    run_on_library_threads(std::min(num_threads, count), job);
  } else {
    own.run(std::min(num_threads, count), job);
  }
  job.rethrow();
}

#else

void run_on(int64_t /*num_threads*/, int64_t count, TaskCall call,
            const void* body) {
  // Nothing would keep libraries from starting threads for each task.
  for (int64_t i = 0; i < count; ++i) call(body, i);
}

#endif

}  // namespace popsim::threads
