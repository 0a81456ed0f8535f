// The instruction sets that the kernels use.
//
// Code that computes is compiled once for each target, and all other code for
// the lowest target, so a build runs on every processor that supports the
// lowest target. The highest target that the processor supports is used, unless
// the user chooses a lower one.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace popsim::processor {

// From the lowest to the highest.
enum class Target : int8_t {
  kBaseline,  // the compiler's default; not on x86-64
  kSse4,      // x86-64-v2
  kAvx2,      // x86-64-v3: with FMA and conversions of float16
  kAvx512,    // x86-64-v4: F, BW, CD, DQ, VL
  kAmx        // with matrix units for bfloat16
};

[[nodiscard]] std::string_view name_of(Target target);

// The targets that this build has kernels for, from the lowest to the highest.
[[nodiscard]] const std::vector<Target>& built_targets();
// The built targets that this processor can run: at least one.
[[nodiscard]] const std::vector<Target>& usable_targets();

// The target in use: the highest usable one, or the chosen one.
[[nodiscard]] Target target();
// Whether the target in use is AVX-512, and the processor has its instructions
// for bfloat16 (VDPBF16PS), too.
[[nodiscard]] bool has_bfloat16_dots();
// `target` must be usable, and no kernel may be in use yet. Throws
// InternalError otherwise.
void choose_target(Target target);
// After this call, no other target can be chosen.
void keep_target();

}  // namespace popsim::processor
