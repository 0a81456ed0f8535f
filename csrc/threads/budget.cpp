#include "threads/budget.h"

#include <ATen/Parallel.h>

#include <algorithm>
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

}  // namespace

int64_t budget() { return omp_in_parallel() != 0 ? 1 : at::get_num_threads(); }

int64_t most() {
  static const auto cores =
      static_cast<int64_t>(std::thread::hardware_concurrency());
  return std::max(cores, budget());
}

// ATen sets the number of a new thread when the thread first asks for it, so
// this asks before it changes the number.
ScopedBudget::ScopedBudget(int64_t num_threads)
    : before_(at::get_num_threads()) {
  check_internal(num_threads >= 1, "a budget of ", num_threads, " threads");
  omp_set_num_threads(static_cast<int>(num_threads));
  mkl_before_ = set_for_mkl(static_cast<int>(num_threads));
}

void use_one_thread() {
#if defined(_OPENMP)  // otherwise all threads share one number
  static_cast<void>(at::get_num_threads());
  omp_set_num_threads(1);
  set_for_mkl(1);
#endif
}

ScopedBudget::~ScopedBudget() {
  omp_set_num_threads(before_);
  set_for_mkl(mkl_before_);
}

}  // namespace popsim::threads
