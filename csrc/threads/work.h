// Amounts of work, as numbers of threads that they are worth.
#pragma once

#include <cstdint>

namespace popsim::threads {

// How many threads an amount of work keeps busy, at least one. Each thread gets
// enough work to be worth waking it: about five microseconds of a core.
struct Work {
  int64_t threads = 1;
};

[[nodiscard]] constexpr Work work_of(int64_t amount, int64_t for_one) {
  const int64_t threads = (amount + for_one / 2) / for_one;
  return {threads < 1 ? 1 : threads};
}

// Elements that are read or written, with little arithmetic.
[[nodiscard]] constexpr Work elements(int64_t count) {
  return work_of(count, 1 << 16);
}

// Vector instructions on elements in the cache, counted per element.
[[nodiscard]] constexpr Work additions(int64_t count) {
  return work_of(count, 1 << 18);
}

// The multiplications of a matrix product or a convolution.
[[nodiscard]] constexpr Work multiplications(int64_t count) {
  return work_of(count, 1 << 18);
}

}  // namespace popsim::threads
