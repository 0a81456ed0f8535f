// Which instructions the kernels use.
//
// What computes is compiled once for each target, all else for the lowest one,
// so that a build runs on every processor that has that. The highest target
// that the processor offers is used, unless a lower one is asked for.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace popsim::processor {

// From the lowest to the highest.
enum class Target : int8_t {
  kBaseline,  // what the compiler takes for granted: not on x86-64
  kSse4,      // x86-64-v2
  kAvx2,      // x86-64-v3: with FMA and conversions of float16
  kAvx512,    // x86-64-v4: F, BW, CD, DQ, VL
  kAmx        // and matrix units for bfloat16
};

[[nodiscard]] std::string_view name_of(Target target);

// Those that this build has kernels for, from the lowest to the highest.
[[nodiscard]] const std::vector<Target>& built_targets();
// The built targets that this processor can run: at least one.
[[nodiscard]] const std::vector<Target>& usable_targets();

// The one in use: the highest usable one, or the one chosen.
[[nodiscard]] Target target();
// Only for a usable target, and before a kernel is asked for. Throws
// InternalError else.
void choose_target(Target target);
// No other target can be chosen from now on.
void keep_target();

}  // namespace popsim::processor
