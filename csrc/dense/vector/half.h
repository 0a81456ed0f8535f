// Rounding to float16 of numbers that stay float32.
#pragma once

// GCC 12 sees uninitialised values in its own AVX-512 headers.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <ATen/cpu/vec/vec.h>
#pragma GCC diagnostic pop

namespace popsim::dense {

// To the nearest number, ties to even; beyond 65504 to infinity.
[[nodiscard]] inline at::vec::Vectorized<float> rounded_to_half(
    const at::vec::Vectorized<float>& x) {
  return at::vec::convert<float>(at::vec::convert<at::Half>(x));
}

}  // namespace popsim::dense
