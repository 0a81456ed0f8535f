#include "threads/tasks.h"

#include <atomic>
#include <exception>

#include "threads/openmp.h"

namespace popsim::threads {

void run_on(int64_t num_threads, int64_t count,
            void (*call)(const void* body, int64_t i), const void* body) {
  std::atomic_flag failed;
  std::exception_ptr error;
  const auto team = static_cast<int>(std::min(num_threads, count));
#pragma omp parallel num_threads(team)
  {
    const Range mine = part(count, omp_get_thread_num(), omp_get_num_threads());
    try {
      for (int64_t i = mine.begin; i < mine.end; ++i) call(body, i);
    } catch (...) {
      if (!failed.test_and_set()) error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace popsim::threads
