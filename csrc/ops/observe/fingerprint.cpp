#include "ops/observe/fingerprint.h"

#include <algorithm>
#include <array>
#include <bit>

#include "ops/math/vec_math.h"

namespace popsim::ops::observe {
namespace {

constexpr int64_t kKeys = 256;
constexpr int64_t kUpperPositions = int64_t{1} << 40;

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

// The sums of the products of bits with the halves of their keys. These are the
// same on all processors, but compilers do not find the instruction that takes
// two 32-bit numbers and gives a product of 64 bits.
struct Products {
  uint64_t lower = 0;
  uint64_t upper = 0;
};

#if defined(CPU_CAPABILITY_AVX512)

template <typename T>
Products products_of(const T* values, int64_t count, const uint32_t* lowers,
                     const uint32_t* uppers, uint32_t key_lower,
                     uint32_t key_upper, int64_t& done) {
  const __m512i with_lower = _mm512_set1_epi32(static_cast<int>(key_lower));
  const __m512i with_upper = _mm512_set1_epi32(static_cast<int>(key_upper));
  __m512i lower = _mm512_setzero_si512();
  __m512i upper = _mm512_setzero_si512();
  const auto odd = [](__m512i x) { return _mm512_srli_epi64(x, 32); };
  for (; done + 16 <= count; done += 16) {
    prefetch_next_block(values + done);
    const __m512i x = _mm512_loadu_si512(values + done);
    const __m512i k =
        _mm512_xor_si512(with_lower, _mm512_loadu_si512(lowers + done));
    const __m512i l =
        _mm512_xor_si512(with_upper, _mm512_loadu_si512(uppers + done));
    lower = _mm512_add_epi64(lower, _mm512_mul_epu32(x, k));
    upper = _mm512_add_epi64(upper, _mm512_mul_epu32(x, l));
    lower = _mm512_add_epi64(lower, _mm512_mul_epu32(odd(x), odd(k)));
    upper = _mm512_add_epi64(upper, _mm512_mul_epu32(odd(x), odd(l)));
  }
  return {static_cast<uint64_t>(_mm512_reduce_add_epi64(lower)),
          static_cast<uint64_t>(_mm512_reduce_add_epi64(upper))};
}

#elif defined(CPU_CAPABILITY_AVX2)

uint64_t sum_across(__m256i lanes) {
  std::array<uint64_t, 4> parts;
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(parts.data()), lanes);
  return parts[0] + parts[1] + parts[2] + parts[3];
}

template <typename T>
Products products_of(const T* values, int64_t count, const uint32_t* lowers,
                     const uint32_t* uppers, uint32_t key_lower,
                     uint32_t key_upper, int64_t& done) {
  const __m256i with_lower = _mm256_set1_epi32(static_cast<int>(key_lower));
  const __m256i with_upper = _mm256_set1_epi32(static_cast<int>(key_upper));
  __m256i lower = _mm256_setzero_si256();
  __m256i upper = _mm256_setzero_si256();
  const auto load = [](const auto* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  };
  const auto odd = [](__m256i x) { return _mm256_srli_epi64(x, 32); };
  for (; done + 8 <= count; done += 8) {
    prefetch_next_block(values + done);
    const __m256i x = load(values + done);
    const __m256i k = _mm256_xor_si256(with_lower, load(lowers + done));
    const __m256i l = _mm256_xor_si256(with_upper, load(uppers + done));
    lower = _mm256_add_epi64(lower, _mm256_mul_epu32(x, k));
    upper = _mm256_add_epi64(upper, _mm256_mul_epu32(x, l));
    lower = _mm256_add_epi64(lower, _mm256_mul_epu32(odd(x), odd(k)));
    upper = _mm256_add_epi64(upper, _mm256_mul_epu32(odd(x), odd(l)));
  }
  return {sum_across(lower), sum_across(upper)};
}

#else

template <typename T>
Products products_of(const T* /*values*/, int64_t /*count*/,
                     const uint32_t* /*lowers*/, const uint32_t* /*uppers*/,
                     uint32_t /*key_lower*/, uint32_t /*key_upper*/,
                     int64_t& /*done*/) {
  return {};
}

#endif

uint32_t bits_at(const float* values, int64_t i) {
  return std::bit_cast<uint32_t>(values[i]);
}

uint32_t bits_at(const uint32_t* values, int64_t i) { return values[i]; }

// `place`: the position of the first value in its block of kKeys positions.
template <typename T>
uint64_t sum_of_block(const T* values, int64_t count, int64_t block,
                      size_t place) {
  const uint64_t key =
      mix((uint64_t{1} << 32) + static_cast<uint64_t>(block)) & ~uint64_t{1};
  const auto key_lower = static_cast<uint32_t>(key);
  const auto key_upper = static_cast<uint32_t>(key >> 32);
  const uint32_t* lower = kPlaceKeys.lower.data() + place;
  const uint32_t* upper = kPlaceKeys.upper.data() + place;
  int64_t done = 0;
  Products products =
      products_of(values, count, lower, upper, key_lower, key_upper, done);
  for (; done < count; ++done) {
    const uint64_t x = bits_at(values, done);
    products.lower += x * (lower[done] ^ key_lower);
    products.upper += x * (upper[done] ^ key_upper);
  }
  return products.lower + (products.upper << 32);
}

template <typename T>
uint64_t sum_of_products(const T* values, int64_t count, int64_t position) {
  uint64_t sum = 0;
  while (count > 0) {
    const int64_t place = position % kKeys;
    const int64_t size = std::min(kKeys - place, count);
    sum += sum_of_block(values, size, position / kKeys,
                        static_cast<size_t>(place));
    values += size;
    position += size;
    count -= size;
  }
  return sum;
}

}  // namespace

uint64_t fingerprint_of(const Block& block) {
  uint64_t sum = 0;
  for (const Segment& segment : block.segments) {
    const auto [position, begin, count] = segment;
    if (block.lower == nullptr) {
      sum += sum_of_products(block.floats + begin, count, position);
      continue;
    }
    sum += sum_of_products(block.lower + begin, count, position);
    if (block.upper == nullptr) continue;
    sum +=
        sum_of_products(block.upper + begin, count, kUpperPositions + position);
  }
  return sum;
}

}  // namespace popsim::ops::observe
