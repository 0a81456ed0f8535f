#include "threads/library_threads.h"

#include <chrono>

#include "threads/budget.h"
#include "threads/float_mode.h"
#include "threads/openmp.h"
#include "threads/wait_policy.h"

namespace popsim::threads {
namespace {

using Clock = std::chrono::steady_clock;

// How long OpenMP's threads look for work: 300,000 times, in GCC's library.
constexpr std::chrono::milliseconds kAwake{5};
// They were late if a job took so much longer than twice the caller's work.
constexpr std::chrono::microseconds kOverdue{200};
constexpr int kTimesOverdue = 8;  // as a multiple of that time

struct Times {
  Clock::time_point awake_until{};
  Clock::time_point rest_until{};
};

thread_local constinit Times own_times{};

}  // namespace

bool libraries_may_share() {
  return budget() > 1 && Clock::now() >= own_times.rest_until;
}

void libraries_have_shared() {
  if (may_spin()) own_times.awake_until = Clock::now() + kAwake;
}

bool library_threads_are_awake() {
  return own_times.awake_until != Clock::time_point{} &&
         Clock::now() < own_times.awake_until;
}

void run_on_library_threads(int64_t num_threads, Job& job) {
  const auto begun = Clock::now();
  auto own_end = begun;
#pragma omp parallel num_threads(static_cast<int>(num_threads))
  {
    const int number = omp_get_thread_num();
    const FloatMode before;
    job.work(number % job.num_parts());
    before.apply();
    if (number == 0) own_end = Clock::now();
  }
  const auto end = Clock::now();
  own_times.awake_until = end + kAwake;
  const auto late = end - own_end - (own_end - begun);
  if (late > kOverdue) own_times = {.rest_until = end + kTimesOverdue * late};
}

void forget_library_threads() { own_times = {}; }

}  // namespace popsim::threads
