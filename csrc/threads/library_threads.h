// The threads of libraries, which are OpenMP's.
//
// When they have helped with a kernel of PyTorch, they look for more work for
// some milliseconds. Helpers would have to share the cores with them, so
// meanwhile they do our tasks themselves. But unlike helpers they delay a job
// until each of them has had a core. If that takes long, kernels of PyTorch run
// on one thread for a while, and these threads fall asleep.
#pragma once

#include <cstdint>

#include "threads/job.h"

namespace popsim::threads {

// Whether libraries may use several threads now, for the calling thread.
[[nodiscard]] bool libraries_may_share();
// A library has used several threads.
void libraries_have_shared();
// Whether the threads that the calling thread has shared work with are awake.
[[nodiscard]] bool library_threads_are_awake();
// Does a job on them. The caller has a budget of one meanwhile.
void run_on_library_threads(int64_t num_threads, Job& job);
// In a process that was forked: the threads are not here.
void forget_library_threads();

}  // namespace popsim::threads
