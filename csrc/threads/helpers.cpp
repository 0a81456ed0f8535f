#include "threads/helpers.h"

#include <algorithm>
#include <string>
#include <system_error>
#include <thread>

#include "threads/wait_policy.h"

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace popsim::threads {
namespace {

using std::chrono::microseconds;

// A helper without a job looks for one this long before it sleeps: longer than
// most ops that one thread computes between two jobs.
constexpr microseconds kIdleSpin{200};
// A caller that waits for a helper looks as long as it has worked itself, and
// this much longer, but at most kMostSpin. Then it sleeps, and so leaves its
// core to a helper that has lost its own.
constexpr microseconds kGrace{20};
constexpr microseconds kMostSpin{200};
// A helper that had no core for longer than this, while its caller slept, rests
// for kLeastRest times as long, and for up to kMostRest times if its last rest
// is not kCalm ago. So does one helper if its caller had no core: the system
// then moves the caller to the core that is free.
constexpr microseconds kLate{200};
constexpr int kLeastRest = 2;
constexpr int kMostRest = 16;
constexpr std::chrono::milliseconds kCalm{100};
constexpr std::chrono::milliseconds kBetweenReadings{1};
constexpr int kLooks = 32;  // between two looks at the clock

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Looks again and again, at most until `end`. Returns whether it is ready.
template <typename Ready, typename Time>
bool spin(Time end, const Ready& ready) {
  do {
    for (int i = 0; i < kLooks; ++i) {
      if (ready()) return true;
      pause();
    }
  } while (Time::clock::now() < end);
  return ready();
}

// How many cores this process may use.
int64_t num_cores() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
  return std::thread::hardware_concurrency();
}

// The clock of the calling thread, which stands still while it has no core.
// Elsewhere no thread is ever late.
clockid_t own_clock() {
  clockid_t clock = CLOCK_MONOTONIC;
#if defined(__linux__)
  pthread_getcpuclockid(pthread_self(), &clock);
#endif
  return clock;
}

std::chrono::nanoseconds time_of(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return std::chrono::seconds(time.tv_sec) +
         std::chrono::nanoseconds(time.tv_nsec);
}

// Finds out how long the calling thread had no core in a stretch of time. It
// reads the slow clock, of the time with a core, only now and then: so it finds
// up to kBetweenReadings less.
class Absence {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Absence(Clock::time_point begun) : begun_(begun) {
    if (begun - reading_.when < kBetweenReadings) return;
    reading_ = {begun, time_of(kOwnClock)};
  }
  [[nodiscard]] std::chrono::nanoseconds until(Clock::time_point now) const {
    const auto passed = now - begun_;
    if (passed < kLate) return {};
    return passed - (time_of(kOwnClock) - reading_.with_core);
  }

 private:
#if defined(__linux__)
  static constexpr clockid_t kOwnClock = CLOCK_THREAD_CPUTIME_ID;
#else
  static constexpr clockid_t kOwnClock = CLOCK_MONOTONIC;
#endif
  struct Reading {
    Clock::time_point when;
    std::chrono::nanoseconds with_core;
  };
  static thread_local constinit Reading reading_;

  Clock::time_point begun_;
};

thread_local constinit Absence::Reading Absence::reading_{};

void name_this_thread(int64_t number) {
#if defined(__linux__)
  pthread_setname_np(pthread_self(),
                     ("popsim-" + std::to_string(number)).c_str());
#else
  static_cast<void>(number);
#endif
}

}  // namespace

void Helpers::run(int64_t num_threads, Job& job) {
  std::array<uint8_t, kMost> numbers;
  const auto begun = Clock::now();
  const Absence absence(begun);
  const int64_t num_offers = offer(job, num_threads - 1, numbers);
  job.work(0);
  const auto helper = [&](int64_t i) -> Helper& {
    return helpers_[numbers[static_cast<size_t>(i)]];
  };
  if (num_offers > 0) {
    const auto now = Clock::now();
    rest_if_late(helper(num_offers - 1), now, absence.until(now));
    for (int64_t i = 0; i < num_offers; ++i) {
      finish(helper(i), now - begun);
    }
  }
}

int64_t Helpers::offer(Job& job, int64_t wanted,
                       std::array<uint8_t, kMost>& numbers) {
  int64_t num_offers = 0;
  for (int64_t i = 0; i < kMost && num_offers < wanted; ++i) {
    if (i == num_started_ && !start_one(wanted)) break;
    Helper& helper = helpers_[static_cast<size_t>(i)];
    if (!hold(helper)) continue;
    numbers[static_cast<size_t>(num_offers++)] = static_cast<uint8_t>(i);
    helper.job = &job;
    helper.part = num_offers % job.num_parts();
    helper.state = State::kOffered;
    helper.offered.ring();
  }
  return num_offers;
}

bool Helpers::hold(Helper& helper) {
  State state = helper.state.load(std::memory_order_relaxed);
  if (state != State::kFree) return false;
  const int64_t rest = helper.rests_until.load(std::memory_order_relaxed);
  if (rest != 0) {
    if (Clock::now().time_since_epoch().count() < rest) return false;
    helper.rests_until.store(0, std::memory_order_relaxed);
  }
  return helper.state.compare_exchange_strong(state, State::kHeld);
}

bool Helpers::start_one(int64_t wanted) {
  static const int64_t cores = num_cores();
  if (is_starting_.test_and_set()) return false;
  const int64_t number = num_started_;
  bool started = false;
  if (number < std::min(kMost, std::max(wanted, cores - 1))) {
    spins_ = number + 2 <= cores && may_spin();
    try {
      std::thread([this, number] {
        name_this_thread(number + 1);
        prepare_();
        serve(helpers_[static_cast<size_t>(number)]);
      }).detach();
      started = true;
      ++num_started_;
    } catch (const std::system_error&) {
      // The system allows no more threads: the caller does without.
    }
  }
  is_starting_.clear();
  return started;
}

void Helpers::finish(Helper& helper, Clock::duration worked) {
  State state = State::kOffered;
  if (helper.state.compare_exchange_strong(state, State::kFree)) return;
  const auto done = [&] { return helper.state.load() != State::kTaken; };
  if (!done()) {
    const auto spins = std::min<Clock::duration>(worked + kGrace, kMostSpin);
    if (!spins_ || !spin(Clock::now() + spins, done)) wait_asleep(helper);
  }
  helper.state = State::kFree;
}

void Helpers::wait_asleep(Helper& helper) {
  const auto begun = Clock::now();
  const auto before = time_of(helper.clock);
  const auto process_before = time_of(CLOCK_PROCESS_CPUTIME_ID);
  helper.done.wait([&] { return helper.state.load() != State::kTaken; });
  const auto now = Clock::now();
  const auto worked = time_of(helper.clock) - before;
  const auto late = now - begun - worked;
  // Other threads of this process that took its core are mostly OpenMP's, which
  // fall asleep in some milliseconds.
  const auto others =
      time_of(CLOCK_PROCESS_CPUTIME_ID) - process_before - worked;
  if (others < late / 2) rest_if_late(helper, now, late);
}

void Helpers::rest_if_late(Helper& helper, Clock::time_point now,
                           std::chrono::nanoseconds without_core) {
  if (without_core < kLate) return;
  const bool again = now - helper.rested_until < kCalm;
  helper.rest = again ? std::min(2 * helper.rest, kMostRest) : kLeastRest;
  helper.rested_until = now + helper.rest * without_core;
  helper.rests_until.store(helper.rested_until.time_since_epoch().count(),
                           std::memory_order_relaxed);
}

void Helpers::serve(Helper& own) {
  own.clock = own_clock();
  const auto has_offer = [&] { return own.state.load() == State::kOffered; };
  for (;;) {
    if (!spins_ || !spin(Clock::now() + kIdleSpin, has_offer)) {
      own.offered.wait(has_offer);
    }
    State state = State::kOffered;
    if (!own.state.compare_exchange_strong(state, State::kTaken)) continue;
    own.job->work(own.part);
    own.state = State::kDone;
    own.done.ring();
  }
}

void Helpers::forget() {
  num_started_ = 0;
  is_starting_.clear();
  for (Helper& helper : helpers_) {
    helper.state = State::kFree;
    helper.offered.forget();
    helper.done.forget();
  }
}

}  // namespace popsim::threads
