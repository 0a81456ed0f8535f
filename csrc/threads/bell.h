// Lets a thread sleep until another thread has changed something.
#pragma once

#include <atomic>
#include <cstdint>

namespace popsim::threads {

// For one thread that waits. What it waits for, and ring(), are in the total
// order of sequentially consistent operations: either the thread sees the
// change before it sleeps, or ring() sees that the thread sleeps.
class Bell {
 public:
  // Sleeps until `ready` returns true. `ready` reads atomic variables.
  template <typename Ready>
  void wait(const Ready& ready) {
    for (;;) {
      asleep_.store(1);
      if (ready()) break;
      asleep_.wait(1);
    }
    asleep_.store(0);
  }
  // Call it after each change.
  void ring() {
    if (asleep_.load() == 0) return;
    asleep_.store(0);
    asleep_.notify_one();
  }
  // In a process that was forked: the thread that waited is not here.
  void forget() { asleep_.store(0); }

 private:
  std::atomic<uint32_t> asleep_ = 0;
};

}  // namespace popsim::threads
