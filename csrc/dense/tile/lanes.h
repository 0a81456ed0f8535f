// Sixteen numbers at a time: with AVX-512, which every processor with the
// matrix units has, or with loops, for tests on other processors (units.h).
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <numeric>

#include "base/dtype.h"

// GCC 12 warns of uninitialised values in its own AVX-512 headers.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <ATen/cpu/vec/vec.h>

namespace popsim::dense {

inline constexpr int64_t kLanes = 16;

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)

using Floats = __m512;
using Bits = __m512i;
using Lanes = __mmask16;

inline Lanes first_lanes(int64_t count) {
  return static_cast<Lanes>((1U << std::clamp<int64_t>(count, 0, kLanes)) - 1U);
}

inline Floats zeros() { return _mm512_setzero_ps(); }
inline Bits bits_of(Floats a) { return _mm512_castps_si512(a); }
inline Floats floats_of(Bits a) { return _mm512_castsi512_ps(a); }
inline Floats all_lanes(float number) { return _mm512_set1_ps(number); }
inline Bits all_lanes(uint32_t bits) {
  return _mm512_set1_epi32(static_cast<int>(bits));
}

inline Floats minus(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats times(Floats a, float b) {
  return _mm512_mul_ps(a, _mm512_set1_ps(b));
}
// a + b * b
inline Floats plus_square(Floats a, Floats b) {
  return _mm512_fmadd_ps(b, b, a);
}
inline float sum_of(Floats a) { return _mm512_reduce_add_ps(a); }
inline Bits plus(Bits a, Bits b) { return _mm512_add_epi32(a, b); }
inline Bits both(Bits a, Bits b) { return _mm512_and_si512(a, b); }
inline Bits either(Bits a, Bits b) { return _mm512_or_si512(a, b); }
inline Bits upper_half_below(Bits a) { return _mm512_srli_epi32(a, 16); }

inline void store(uint16_t* to, Bits a) { _mm512_store_si512(to, a); }

inline Floats widened(__m256i numbers, DType dtype) {
  return dtype == DType::kFloat16
             ? _mm512_cvtph_ps(numbers)
             : floats_of(_mm512_slli_epi32(_mm512_cvtepu16_epi32(numbers), 16));
}

// Loads numbers from memory as float32.
template <DType kType>
Floats load(const void* data, int64_t offset) {
  if constexpr (kType == DType::kFloat32) {
    return _mm512_loadu_ps(static_cast<const float*>(data) + offset);
  } else {
    const auto* numbers = static_cast<const uint16_t*>(data) + offset;
    return widened(
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(numbers)), kType);
  }
}

// The same, with zeros in the other lanes.
template <DType kType>
Floats load(const void* data, int64_t offset, Lanes lanes) {
  if constexpr (kType == DType::kFloat32) {
    return _mm512_maskz_loadu_ps(lanes,
                                 static_cast<const float*>(data) + offset);
  } else {
    const auto* numbers = static_cast<const uint16_t*>(data) + offset;
    return widened(_mm256_maskz_loadu_epi16(lanes, numbers), kType);
  }
}

#else

struct Floats {
  float of[kLanes];
};
struct Bits {
  uint32_t of[kLanes];
};
// The number of lanes, counted from the first, that an operation uses.
using Lanes = int64_t;

inline Lanes first_lanes(int64_t count) {
  return std::clamp<int64_t>(count, 0, kLanes);
}

template <typename Result, typename Body>
Result each_lane(const Body& body) {
  Result result;
  for (int64_t i = 0; i < kLanes; ++i) result.of[i] = body(i);
  return result;
}

inline Floats zeros() { return {}; }
inline Bits bits_of(const Floats& a) { return std::bit_cast<Bits>(a); }
inline Floats floats_of(const Bits& a) { return std::bit_cast<Floats>(a); }
inline Floats all_lanes(float number) {
  return each_lane<Floats>([&](int64_t /*i*/) { return number; });
}
inline Bits all_lanes(uint32_t bits) {
  return each_lane<Bits>([&](int64_t /*i*/) { return bits; });
}

inline Floats minus(const Floats& a, const Floats& b) {
  return each_lane<Floats>([&](int64_t i) { return a.of[i] - b.of[i]; });
}
inline Floats times(const Floats& a, float b) {
  return each_lane<Floats>([&](int64_t i) { return a.of[i] * b; });
}
inline Floats plus_square(const Floats& a, const Floats& b) {
  return each_lane<Floats>(
      [&](int64_t i) { return a.of[i] + b.of[i] * b.of[i]; });
}
inline Bits plus(const Bits& a, const Bits& b) {
  return each_lane<Bits>([&](int64_t i) { return a.of[i] + b.of[i]; });
}
inline Bits both(const Bits& a, const Bits& b) {
  return each_lane<Bits>([&](int64_t i) { return a.of[i] & b.of[i]; });
}
inline Bits either(const Bits& a, const Bits& b) {
  return each_lane<Bits>([&](int64_t i) { return a.of[i] | b.of[i]; });
}
inline Bits upper_half_below(const Bits& a) {
  return each_lane<Bits>([&](int64_t i) { return a.of[i] >> 16; });
}
inline float sum_of(const Floats& a) {
  return std::accumulate(a.of, a.of + kLanes, 0.0F);
}

inline void store(uint16_t* to, const Bits& a) {
  for (int64_t i = 0; i < kLanes; ++i) {
    to[2 * i] = static_cast<uint16_t>(a.of[i]);
    to[2 * i + 1] = static_cast<uint16_t>(a.of[i] >> 16);
  }
}

inline float number(const void* data, int64_t at, DType dtype) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(data)[at];
  if (dtype == DType::kFloat16) return static_cast<const at::Half*>(data)[at];
  return static_cast<const at::BFloat16*>(data)[at];
}

template <DType kType>
Floats load(const void* data, int64_t offset, Lanes lanes = kLanes) {
  return each_lane<Floats>([&](int64_t i) {
    return i < lanes ? number(data, offset + i, kType) : 0.0F;
  });
}

#endif

}  // namespace popsim::dense

#pragma GCC diagnostic pop
