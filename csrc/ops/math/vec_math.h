// Functions for vectors of floats; inlined, where at::vec calls a library.
#pragma once

// GCC 12 warns of uninitialised values in its own AVX-512 headers.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <ATen/cpu/vec/vec.h>
// This must come after vec.h, which otherwise includes parts of it in the wrong
// order.
#include <ATen/cpu/vec/functional_base.h>
#pragma GCC diagnostic pop

#include <cmath>
#include <cstdint>
#include <type_traits>

namespace popsim::ops {

using Vec = at::vec::Vectorized<float>;
inline constexpr int64_t kLanes = Vec::size();

// Calls body(i, lanes) for the vectors of [0, count): first the whole vectors,
// then the rest. For whole vectors, `lanes` is a compile-time constant.
template <typename Body>
inline void for_each_vector(int64_t count, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    body(i, std::integral_constant<int64_t, kLanes>{});
  }
  if (i < count) body(i, count - i);
}

// Loads a whole vector, or its first lanes and zeros.
template <typename Lanes>
inline Vec load(const float* values, Lanes lanes) {
  if constexpr (std::is_same_v<Lanes, int64_t>) {
    return Vec::loadu(values, lanes);
  } else {
    static_assert(Lanes::value == kLanes);
    return Vec::loadu(values);
  }
}

template <typename Lanes>
inline void store(const Vec& vector, float* values, Lanes lanes) {
  if constexpr (std::is_same_v<Lanes, int64_t>) {
    vector.store(values, static_cast<int>(lanes));
  } else {
    static_assert(Lanes::value == kLanes);
    vector.store(values);
  }
}

// The first lanes of a vector, and `other` in the remaining lanes.
template <typename Lanes>
inline Vec keep(const Vec& vector, const Vec& other, Lanes lanes) {
  if constexpr (std::is_same_v<Lanes, int64_t>) {
    return Vec::set(other, vector, lanes);
  } else {
    static_assert(Lanes::value == kLanes);
    return vector;
  }
}

inline float sum_across(const Vec& lanes) {
  return at::vec::vec_reduce_all<float>(
      [](const Vec& a, const Vec& b) { return a + b; }, lanes);
}

// The larger of two numbers; if one of them is NaN, the result may be either.
inline Vec larger(const Vec& a, const Vec& b) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_max_ps(a, b);
#elif defined(CPU_CAPABILITY_AVX2)
  return _mm256_max_ps(a, b);
#else
  return at::vec::maximum(a, b);
#endif
}

inline float max_across(const Vec& lanes) {
  return at::vec::vec_reduce_all<float>(
      [](const Vec& a, const Vec& b) { return larger(a, b); }, lanes);
}

#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
#define POPSIM_INLINE_EXP 1

// exp(r) for |r| <= ln(2) / 2, with the coefficients of Cephes' expf.
inline Vec exp_of_remainder(const Vec& r) {
  using at::vec::fmadd;
  Vec p(1.9875691500e-4f);
  p = fmadd(p, r, Vec(1.3981999507e-3f));
  p = fmadd(p, r, Vec(8.3334519073e-3f));
  p = fmadd(p, r, Vec(4.1665795894e-2f));
  p = fmadd(p, r, Vec(1.6666665459e-1f));
  p = fmadd(p, r, Vec(5.0000001201e-1f));
  return fmadd(r * r, p, r) + Vec(1.0f);
}
#endif

// The error is at most 2 ulp for every argument; NaN gives NaN.
inline Vec exp(const Vec& x) {
#if defined(POPSIM_INLINE_EXP)
  using at::vec::fmadd;
  constexpr float kLog2e = 1.44269504088896341f;
  constexpr float kLn2High = 0.693359375f;
  constexpr float kLn2Low = -2.12194440e-4f;
#endif
#if defined(CPU_CAPABILITY_AVX512)
  // min and max return their second operand if one operand is NaN.
  const Vec bounded = _mm512_max_ps(_mm512_set1_ps(-105.0f),
                                    _mm512_min_ps(_mm512_set1_ps(90.0f), x));
  const Vec n = (bounded * Vec(kLog2e)).round();
  const Vec r = fmadd(n, Vec(-kLn2Low), fmadd(n, Vec(-kLn2High), bounded));
  return _mm512_scalef_ps(exp_of_remainder(r), n);
#elif defined(CPU_CAPABILITY_AVX2)
  const Vec bounded = _mm256_max_ps(_mm256_set1_ps(-105.0f),
                                    _mm256_min_ps(_mm256_set1_ps(90.0f), x));
  const Vec n = (bounded * Vec(kLog2e)).round();
  const Vec r = fmadd(n, Vec(-kLn2Low), fmadd(n, Vec(-kLn2High), bounded));
  // 2^n as two factors, because n may be outside the range of exponents.
  const __m256i whole = _mm256_cvtps_epi32(n);
  const __m256i half = _mm256_srai_epi32(whole, 1);
  const auto power = [](const __m256i& exponent) -> Vec {
    return _mm256_castsi256_ps(_mm256_slli_epi32(
        _mm256_add_epi32(exponent, _mm256_set1_epi32(127)), 23));
  };
  return exp_of_remainder(r) * power(half) *
         power(_mm256_sub_epi32(whole, half));
#else
  return x.exp();
#endif
}

// The error is at most 2 ulp; negative numbers and NaN give NaN.
inline Vec log(const Vec& x) {
#if defined(CPU_CAPABILITY_AVX512)
  using at::vec::fmadd;
  // x = m * 2^e with m close to 1, and the coefficients of Cephes' logf.
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512 significand =
      _mm512_getmant_ps(x, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_src);
  const __m512 exponent = _mm512_getexp_ps(x);
  const __mmask16 big =
      _mm512_cmp_ps_mask(significand, _mm512_set1_ps(1.41421356f), _CMP_GT_OQ);
  const Vec m =
      _mm512_mask_mul_ps(significand, big, significand, _mm512_set1_ps(0.5f));
  const Vec e = _mm512_mask_add_ps(exponent, big, exponent, one);
  const Vec r = m - Vec(1.0f);
  Vec p(7.0376836292e-2f);
  p = fmadd(p, r, Vec(-1.1514610310e-1f));
  p = fmadd(p, r, Vec(1.1676998740e-1f));
  p = fmadd(p, r, Vec(-1.2420140846e-1f));
  p = fmadd(p, r, Vec(1.4249322787e-1f));
  p = fmadd(p, r, Vec(-1.6668057665e-1f));
  p = fmadd(p, r, Vec(2.0000714765e-1f));
  p = fmadd(p, r, Vec(-2.4999993993e-1f));
  p = fmadd(p, r, Vec(3.3333331174e-1f));
  const Vec square = r * r;
  Vec y = fmadd(p, r * square, e * Vec(-2.12194440e-4f));
  y = fmadd(square, Vec(-0.5f), y);
  y = fmadd(e, Vec(0.693359375f), r + y);
  // Handles zero, infinity, negative numbers and NaN.
  const __mmask16 ordinary =
      _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_GT_OQ) &
      _mm512_cmp_ps_mask(x, _mm512_set1_ps(INFINITY), _CMP_LT_OQ);
  const __mmask16 zero = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_EQ_OQ);
  const __m512 rest =
      _mm512_mask_blend_ps(zero, _mm512_sqrt_ps(x), _mm512_set1_ps(-INFINITY));
  return _mm512_mask_blend_ps(ordinary, rest, y);
#else
  return x.log();
#endif
}

// The error is at most 2 ulp.
inline Vec tanh(const Vec& x) {
#if defined(POPSIM_INLINE_EXP)
  using at::vec::fmadd;
  const Vec magnitude = x.abs();
  const Vec square = x * x;
  // The coefficients of Cephes' tanhf.
  Vec p(-5.70498872745e-3f);
  p = fmadd(p, square, Vec(2.06390887954e-2f));
  p = fmadd(p, square, Vec(-5.37397155531e-2f));
  p = fmadd(p, square, Vec(1.33314422036e-1f));
  p = fmadd(p, square, Vec(-3.33332819422e-1f));
  const Vec small = fmadd(p * square, magnitude, magnitude);
  const Vec large =
      Vec(1.0f) - Vec(2.0f) / (exp(magnitude + magnitude) + Vec(1.0f));
  const Vec result = Vec::blendv(large, small, magnitude < Vec(0.625f));
  return result | (x & Vec(-0.0f));
#else
  return x.tanh();
#endif
}

}  // namespace popsim::ops
