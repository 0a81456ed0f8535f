// How far threads are that wait for each other.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

namespace popsim::threads {

// A number for each of some activities, that only one thread raises. A thread
// that waits first looks again and again for a short time, then sleeps.
class Progress {
 public:
  // `spin` is false where there are more threads than cores.
  Progress(size_t count, bool spin) : counts_(count), spin_(spin) {}

  // Begins anew. No thread may wait or raise a number meanwhile.
  void reset() {
    for (Count& count : counts_) count.value.store(0);
  }
  void raise(size_t i, int64_t value) {
    counts_[i].value.store(value);
    if (num_sleeping_.load() > 0) wake();
  }
  [[nodiscard]] int64_t operator[](size_t i) const {
    return counts_[i].value.load();
  }
  // Lets all threads that wait look again.
  void wake();
  // Waits until number i is `least` or more. Returns false as soon as
  // `goes_on`, which is asked again and again, does.
  template <typename GoesOn>
  bool wait(size_t i, int64_t least, const GoesOn& goes_on) {
    const auto reached = [&] { return counts_[i].value.load() >= least; };
    if (reached()) return true;
    if (spin_) {
      const auto end = Clock::now() + kSpin;
      while (Clock::now() < end) {
        for (int k = 0; k < kLooks; ++k) {
          if (reached()) return true;
        }
      }
    }
    std::unique_lock lock(mutex_);
    num_sleeping_.fetch_add(1);
    bool lasts = true;
    while (!reached() && lasts) {
      changed_.wait_for(lock, kSleep);
      if (reached()) break;
      lock.unlock();
      lasts = goes_on();
      lock.lock();
    }
    num_sleeping_.fetch_sub(1);
    return reached();
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::microseconds kSpin{50};
  static constexpr std::chrono::milliseconds kSleep{20};
  static constexpr int kLooks = 32;

  // Each in its own cache line: threads write to theirs without disturbing
  // those that read others.
  struct alignas(64) Count {
    std::atomic<int64_t> value = 0;
  };

  std::vector<Count> counts_;
  bool spin_;
  std::atomic<int64_t> num_sleeping_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
};

}  // namespace popsim::threads
