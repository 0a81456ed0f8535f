// Callers give jobs to helpers at the same time. Prints what was wrong, if
// anything was, and returns 1.
#include <chrono>
#include <cstdio>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "threads/helpers.h"

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace {

using popsim::threads::Helpers;

constexpr int64_t kCallers = 3;
constexpr int64_t kJobs = 400;
constexpr int64_t kMostTasks = 40;
constexpr int64_t kSlowest = 300;  // microseconds

std::atomic<int64_t> failures = 0;

void expect(bool holds, const char* what) {
  if (holds) return;
  ++failures;
  std::fprintf(stderr, "%s\n", what);
}

constinit Helpers helpers([] {});

template <typename Body>
void run(int64_t num_threads, int64_t count, const Body& body) {
  popsim::threads::Job job(
      num_threads, count,
      [](const void* called, int64_t i) {
        (*static_cast<const Body*>(called))(i);
      },
      &body);
  helpers.run(num_threads, job);
  job.rethrow();
}

// Numbers that are no atomic variables: ThreadSanitizer sees it if a task runs
// twice, or the caller goes on while a task runs.
void do_each_once(std::mt19937& random) {
  const auto count = static_cast<int64_t>(random() % kMostTasks);
  const auto slow = static_cast<int64_t>(random() % kMostTasks);
  std::vector<int64_t> done(static_cast<size_t>(count));
  run(1 + static_cast<int64_t>(random() % 5), count, [&](int64_t i) {
    if (i == slow) {
      std::this_thread::sleep_for(std::chrono::microseconds(kSlowest));
    }
    done[static_cast<size_t>(i)] += i + 1;
  });
  for (int64_t i = 0; i < count; ++i) {
    expect(done[static_cast<size_t>(i)] == i + 1, "a task ran not once");
  }
}

void fail_in_some(std::mt19937& random) {
  const auto first = static_cast<int64_t>(random() % kMostTasks);
  const auto second = static_cast<int64_t>(random() % kMostTasks);
  std::string message;
  try {
    run(4, kMostTasks, [&](int64_t i) {
      if (i == first || i == second)
        throw std::runtime_error(std::to_string(i));
    });
  } catch (const std::runtime_error& error) {
    message = error.what();
  }
  expect(message == std::to_string(std::min(first, second)),
         "not the error of the first task that fails");
}

#if defined(__SSE__)

// Whether the calling thread takes small numbers for zero.
bool flushes() {
  volatile float small = 1e-38F;
  return small * 0.1F == 0.0F;
}

void keep_the_mode(bool on) {
  _mm_setcsr(on ? _mm_getcsr() | 0x8000U : _mm_getcsr() & ~0x8000U);
  std::atomic<int64_t> same = 0;
  run(4, kMostTasks, [&](int64_t) { same += flushes() == on ? 1 : 0; });
  expect(same == kMostTasks, "tasks have another mode than the caller");
}

#else

void keep_the_mode(bool /*on*/) {}

#endif

}  // namespace

int main() {
  std::vector<std::thread> callers;
  for (int64_t number = 0; number < kCallers; ++number) {
    callers.emplace_back([number] {
      std::mt19937 random(static_cast<unsigned>(number));
      for (int64_t i = 0; i < kJobs; ++i) {
        do_each_once(random);
        if (i % 4 == 0) fail_in_some(random);
        if (i % 4 == 1) keep_the_mode(i % 8 == 1);
        // Helpers fall asleep now and then.
        if (i % 50 == 0)
          std::this_thread::sleep_for(std::chrono::milliseconds(2));
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  return failures == 0 ? 0 : 1;
}
