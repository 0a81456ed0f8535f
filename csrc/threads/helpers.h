// Threads that help callers with their tasks.
//
// A caller never depends on them. It offers a job to helpers that are free, and
// does each task that none of them has begun; at the end it waits only for
// tasks that are under way. So a helper that gets no time, since another
// program has its core, delays nothing unless it has begun a task.
//
// A task under way on a core that was taken away lasts until its thread gets
// time again, mostly some milliseconds. After that a helper rests: the caller
// works without it for as long; for many times as long if it happens again and
// again. So such waits are a small part of all time.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <ctime>

#include "threads/bell.h"
#include "threads/job.h"

namespace popsim::threads {

class Helpers {
 public:
  // Starts no thread before the first job. Each calls `prepare` first. They
  // live as long as the process.
  explicit constexpr Helpers(void (*prepare)()) : prepare_(prepare) {}
  Helpers(const Helpers&) = delete;
  Helpers& operator=(const Helpers&) = delete;

  // Does a job on the calling thread and at most num_threads - 1 helpers.
  // Several threads may call this at the same time; a task may not.
  void run(int64_t num_threads, Job& job);
  // In a process that was forked: the threads are not here.
  void forget();

 private:
  using Clock = std::chrono::steady_clock;

  enum class State : uint32_t {
    kFree,     // for any caller
    kHeld,     // by a caller, which prepares an offer
    kOffered,  // a job
    kTaken,    // the job: the helper works on it
    kDone      // the caller has not seen it yet
  };
  struct alignas(64) Helper {
    std::atomic<State> state = State::kFree;
    Bell offered;
    Bell done;
    Job* job = nullptr;
    int64_t part = 0;
    // Until then it gets no offers; nanoseconds of the clock, or 0.
    std::atomic<int64_t> rests_until = 0;
    // The same of its last rest, and how many times as long as it had had no
    // core that was. Those who hold it use this.
    Clock::time_point rested_until{};
    int rest = 1;
    // Stands still while the helper has no core. Its thread sets it before it
    // takes the first job.
    std::atomic<clockid_t> clock = CLOCK_MONOTONIC;
  };
  static constexpr int64_t kMost = 256;

  // Offers the job to helpers that are free. Returns how many have it.
  int64_t offer(Job& job, int64_t wanted, std::array<uint8_t, kMost>& numbers);
  [[nodiscard]] static bool hold(Helper& helper);
  // Starts another thread, unless there are as many as wanted, and as cores.
  [[nodiscard]] bool start_one(int64_t wanted);
  // Takes the offer back, or waits until the helper is done. `worked` is the
  // time of the caller's own work.
  void finish(Helper& helper, Clock::duration worked);
  void wait_asleep(Helper& helper);
  static void rest_if_late(Helper& helper, Clock::time_point now,
                           std::chrono::nanoseconds without_core);
  void serve(Helper& own);

  void (*const prepare_)();
  std::atomic<int64_t> num_started_ = 0;
  std::atomic_flag is_starting_;
  std::atomic<bool> spins_ = false;
  std::array<Helper, kMost> helpers_;
};

}  // namespace popsim::threads
