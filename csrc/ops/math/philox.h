// Philox4x32-10, the counter based random number generator of Salmon et al.,
// "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
//
// It processes many counters at a time, in loops that the compiler vectorises.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace popsim::ops {

inline constexpr size_t kPhiloxLanes = 32;
using PhiloxLanes = std::array<uint32_t, kPhiloxLanes>;
// One word for each lane; four words make one 128-bit counter or result.
using PhiloxWords = std::array<PhiloxLanes, 4>;

struct PhiloxKey {
  uint32_t low;
  uint32_t high;
};

inline void philox_round(PhiloxWords& words, PhiloxKey key) {
  constexpr uint64_t kMultiplier0 = 0xD2511F53;
  constexpr uint64_t kMultiplier1 = 0xCD9E8D57;
  for (size_t i = 0; i < kPhiloxLanes; ++i) {
    const uint64_t product0 = kMultiplier0 * words[0][i];
    const uint64_t product1 = kMultiplier1 * words[2][i];
    words[0][i] = static_cast<uint32_t>(product1 >> 32) ^ words[1][i] ^ key.low;
    words[1][i] = static_cast<uint32_t>(product1);
    words[2][i] =
        static_cast<uint32_t>(product0 >> 32) ^ words[3][i] ^ key.high;
    words[3][i] = static_cast<uint32_t>(product0);
  }
}

// Turns counters into random words, in place.
inline void philox(PhiloxWords& words, PhiloxKey key) {
  constexpr int kRounds = 10;
  for (int round = 0; round < kRounds; ++round) {
    philox_round(words, key);
    key.low += 0x9E3779B9;
    key.high += 0xBB67AE85;
  }
}

}  // namespace popsim::ops
