#include "threads/budget.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <mutex>
#include <thread>

#include "base/check.h"
#include "threads/openmp.h"

// MKL, which PyTorch includes on some processors, ignores OpenMP's number of
// threads after PyTorch has set a number for the process. This function sets
// the number for the calling thread; zero: the process's number. Returns the
// previous number.
extern "C" int MKL_Set_Num_Threads_Local(int num_threads) __attribute__((weak));

namespace popsim::threads {
namespace {

int set_for_mkl(int num_threads) {
  if (&MKL_Set_Num_Threads_Local == nullptr) return 0;
  return MKL_Set_Num_Threads_Local(num_threads);
}

// The number of the calling thread. ATen sets it when a thread first asks for
// it. In a process that was forked it then makes a pool of threads, and fails
// if two threads ask at the same time.
int num_threads_of_aten() {
  thread_local constinit bool has_asked = false;
  if (!has_asked) {
    static std::mutex mutex;
    const std::lock_guard lock(mutex);
    static_cast<void>(at::get_num_threads());
    has_asked = true;
  }
  return at::get_num_threads();
}

}  // namespace

int64_t budget() { return omp_in_parallel() != 0 ? 1 : num_threads_of_aten(); }

int64_t most() {
  static const auto cores =
      static_cast<int64_t>(std::thread::hardware_concurrency());
  return std::max(cores, budget());
}

// Asks before it changes the number: the first answer would change it again.
ScopedBudget::ScopedBudget(int64_t num_threads)
    : before_(num_threads_of_aten()) {
  check_internal(num_threads >= 1, "a budget of ", num_threads, " threads");
  omp_set_num_threads(static_cast<int>(num_threads));
  mkl_before_ = set_for_mkl(static_cast<int>(num_threads));
}

void use_one_thread() {
#if defined(_OPENMP)  // otherwise all threads share one number
  static_cast<void>(num_threads_of_aten());
  omp_set_num_threads(1);
  set_for_mkl(1);
#endif
}

ScopedBudget::~ScopedBudget() {
  omp_set_num_threads(before_);
  set_for_mkl(mkl_before_);
}

}  // namespace popsim::threads
