// How many threads may work at a time.
//
// The budget belongs to the thread that runs the program: it counts that thread
// and those that it wakes, whoever wakes them - our own code, ATen, oneDNN or
// MKL.
// At first it is the process's number of threads (torch.set_num_threads).
#pragma once

#include <cstdint>

namespace popsim::threads {

// How many threads the calling thread may use; 1 inside of a task that shares
// its work with others.
[[nodiscard]] int64_t budget();

// The most threads that will work at a time, as far as is known while a kernel
// is prepared: a kernel makes what each of its threads needs for that number.
[[nodiscard]] int64_t most();

// Another budget for the length of a scope, on this thread.
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
