// The number of threads that may work at the same time.
//
// The budget belongs to the thread that runs the program: it counts that thread
// and all threads that it wakes, through our own code, ATen, oneDNN or MKL. At
// first it is the process's number of threads (torch.set_num_threads).
#pragma once

#include <cstdint>

namespace popsim::threads {

// The number of threads that the calling thread may use; 1 inside a task that
// shares its work with others.
[[nodiscard]] int64_t budget();

// The largest number of threads that will work at the same time, as far as this
// is known while a kernel is prepared: a kernel allocates memory for this
// number of threads.
[[nodiscard]] int64_t most();

// Another budget for a scope, on this thread.
class ScopedBudget {
 public:
  explicit ScopedBudget(int64_t num_threads);
  ScopedBudget(const ScopedBudget&) = delete;
  ScopedBudget& operator=(const ScopedBudget&) = delete;
  ~ScopedBudget();

 private:
  int before_;
  int mkl_before_;
};

// Gives the calling thread a budget of one for the rest of its life.
void use_one_thread();

}  // namespace popsim::threads
