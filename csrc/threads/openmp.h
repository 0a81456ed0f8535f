// The part of OpenMP that this package uses. If the compiler has no OpenMP
// (Apple's), our own code runs on one thread, and ATen on its own number of
// threads.
#pragma once

#if defined(_OPENMP)
#include <omp.h>
#else
#include <ATen/Parallel.h>

inline int omp_in_parallel() { return 0; }
inline int omp_get_thread_num() { return 0; }
inline void omp_set_num_threads(int num_threads) {
  at::set_num_threads(num_threads);
}
#endif
