// Rounds numbers to float16 that are stored as float32.
#pragma once

// GCC 12 warns of uninitialised values in its own AVX-512 headers.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <ATen/cpu/vec/vec.h>
#pragma GCC diagnostic pop

namespace popsim::dense {

// Rounds to nearest, ties to even; numbers beyond 65504 become infinity as in
// float16.
[[nodiscard]] inline at::vec::Vectorized<float> rounded_to_half(
    const at::vec::Vectorized<float>& x) {
  return at::vec::convert<float>(at::vec::convert<at::Half>(x));
}

}  // namespace popsim::dense
