#include "ops/observe/fingerprint.h"

#include <algorithm>
#include <array>
#include <bit>

namespace popsim::ops::observe {
namespace {

constexpr int64_t kKeys = 256;
constexpr int64_t kUpperPositions = int64_t{1} << 40;
static_assert(kBlock % kKeys == 0, "a block begins with the first key");

constexpr uint64_t mix(uint64_t x) {
  uint64_t z = (x + 1) * 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

// The two halves apart: the product of 32-bit numbers is what processors have.
struct Keys {
  std::array<uint32_t, kKeys> lower{};
  std::array<uint32_t, kKeys> upper{};
};

constexpr Keys make_keys() {
  Keys keys;
  for (size_t i = 0; i < kKeys; ++i) {
    const uint64_t key = mix(i) | 1;
    keys.lower[i] = static_cast<uint32_t>(key);
    keys.upper[i] = static_cast<uint32_t>(key >> 32);
  }
  return keys;
}

constexpr Keys kPlaceKeys = make_keys();

uint32_t bits_at(const float* values, int64_t i) {
  return std::bit_cast<uint32_t>(values[i]);
}

uint32_t bits_at(const uint32_t* values, int64_t i) { return values[i]; }

// `first`: the position of the first value, a multiple of kKeys.
template <typename T>
uint64_t sum_of_products(const T* values, int64_t count, int64_t first) {
  uint64_t sum = 0;
  for (int64_t begin = 0; begin < count; begin += kKeys) {
    const uint64_t key = mix((uint64_t{1} << 32) +
                             static_cast<uint64_t>((first + begin) / kKeys)) &
                         ~uint64_t{1};
    const auto key_lower = static_cast<uint32_t>(key);
    const auto key_upper = static_cast<uint32_t>(key >> 32);
    const int64_t size = std::min(kKeys, count - begin);
    uint64_t lower = 0;
    uint64_t upper = 0;
    for (int64_t i = 0; i < size; ++i) {
      const auto place = static_cast<size_t>(i);
      const uint64_t bits = bits_at(values, begin + i);
      lower += bits * (kPlaceKeys.lower[place] ^ key_lower);
      upper += bits * (kPlaceKeys.upper[place] ^ key_upper);
    }
    sum += lower + (upper << 32);
  }
  return sum;
}

}  // namespace

uint64_t fingerprint_of(const Block& block) {
  if (block.lower == nullptr) {
    return sum_of_products(block.floats, block.count, block.first);
  }
  uint64_t sum = sum_of_products(block.lower, block.count, block.first);
  if (block.upper != nullptr) {
    sum += sum_of_products(block.upper, block.count,
                           kUpperPositions + block.first);
  }
  return sum;
}

}  // namespace popsim::ops::observe
