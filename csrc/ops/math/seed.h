// Combines several numbers into one: into seeds for PyTorch's generators, and
// into the step of a loop's iteration.
#pragma once

#include <cstdint>

namespace popsim::ops {

// A seed for one op at one micro-batch: it depends neither on earlier ops nor
// on the thread. (splitmix64 over the three keys.)
[[nodiscard]] constexpr uint64_t mix_seed(uint64_t seed, uint64_t op,
                                          uint64_t step) {
  uint64_t mixed = seed;
  for (const uint64_t key : {op, step}) {
    mixed += 0x9E3779B97F4A7C15ULL * (key + 1);
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9ULL;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBULL;
    mixed ^= mixed >> 31;
  }
  return mixed;
}

}  // namespace popsim::ops
