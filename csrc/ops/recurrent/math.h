// The functions of recurrent layers' gates, for one vector at a time.
#pragma once

#include <ATen/cpu/vec/vec.h>

#include <cstdint>

namespace popsim::ops::recurrent {

using Vec = at::vec::Vectorized<float>;
inline constexpr int64_t kLanes = Vec::size();

// AVX-512 has an instruction for each of the next two functions; the vector
// library takes several. The bits are the same.

// x * 2^n, for whole n from -126 to 127 and a result that is not denormal.
[[nodiscard]] inline Vec times_power_of_2(Vec x, Vec n) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_scalef_ps(x, n);
#else
  using Int = at::vec::Vectorized<int32_t>;
  const Int exponent = at::vec::convert_to_int_of_same_size(n) + Int(127);
  return x * at::vec::cast<float>(exponent << Int(23));
#endif
}

// `yes` where x < limit, else `no`.
[[nodiscard]] inline Vec where_less(Vec x, Vec limit, Vec yes, Vec no) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, limit, _CMP_LT_OQ), no,
                              yes);
#else
  return Vec::blendv(no, yes, x < limit);
#endif
}

// The relative error is at most 2e-7 for |x| <= 87; beyond, the result is the
// value at 87 or -87.
[[nodiscard]] inline Vec exp(Vec x) {
  x = at::vec::clamp(x, Vec(-87.0f), Vec(87.0f));
  const Vec n = (x * Vec(1.44269504f)).round();
  // x = n * ln(2) + r, where ln(2) is the sum of two parts, and n times the
  // first part is exact.
  Vec r = at::vec::fmadd(n, Vec(-0.693359375f), x);
  r = at::vec::fmadd(n, Vec(2.12194440e-4f), r);
  // 1 + r + r^2 * p(r), with p interpolated at Chebyshev's points.
  Vec p(1.3926176e-3f);
  p = at::vec::fmadd(p, r, Vec(8.3631733e-3f));
  p = at::vec::fmadd(p, r, Vec(4.1666556e-2f));
  p = at::vec::fmadd(p, r, Vec(0.16666578f));
  p = at::vec::fmadd(p, r, Vec(0.5f));
  return times_power_of_2(at::vec::fmadd(r * r, p, r) + Vec(1.0f), n);
}

[[nodiscard]] inline Vec sigmoid(Vec x) {
  const Vec one(1.0f);
  return one / (one + exp(x.neg()));
}

// The relative error is at most 2e-7; several times faster than the vector
// library's tanh, whose calls spill all registers.
[[nodiscard]] inline Vec tanh(Vec x) {
  // Near 0 the formula for the rest would cancel, so it is x + x^3 * p(x^2),
  // with p interpolated at Chebyshev's points.
  const Vec square = x * x;
  Vec p(-0.006096714f);
  p = at::vec::fmadd(p, square, Vec(0.02099718f));
  p = at::vec::fmadd(p, square, Vec(-0.053850908f));
  p = at::vec::fmadd(p, square, Vec(0.1333277f));
  p = at::vec::fmadd(p, square, Vec(-0.33333328f));
  const Vec near = at::vec::fmadd(x * square, p, x);
  const Vec size = x.abs();
  const Vec one(1.0f);
  const Vec rest = one - Vec(2.0f) / (exp(size + size) + one);
  const Vec far = where_less(x, Vec(0.0f), rest.neg(), rest);
  return where_less(size, Vec(0.625f), near, far);
}

}  // namespace popsim::ops::recurrent
