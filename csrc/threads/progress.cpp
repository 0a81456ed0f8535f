#include "threads/progress.h"

namespace popsim::threads {

void Progress::wake() {
  // A thread that is about to sleep has looked with the lock held.
  {
    const std::lock_guard lock(mutex_);
  }
  changed_.notify_all();
}

}  // namespace popsim::threads
