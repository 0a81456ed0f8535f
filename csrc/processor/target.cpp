#include "processor/target.h"

#include <algorithm>
#include <array>
#include <atomic>

#include "base/check.h"
#include "processor/built_targets.h"

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace popsim::processor {
namespace {

// Indices are Targets.
constexpr std::array<std::string_view, 5> kNames{"baseline", "sse4", "avx2",
                                                 "avx512", "amx"};

#if defined(__x86_64__)
bool has_matrix_units() {
#if defined(__linux__)
  // From Linux' asm/prctl.h: a process must request the state of the tiles
  // once.
  constexpr long kRequestPermission = 0x1023;
  constexpr long kTileData = 18;
  return __builtin_cpu_supports("amx-bf16") != 0 &&
         __builtin_cpu_supports("avx512bf16") != 0 &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

bool is_usable(Target target) {
  switch (target) {
    case Target::kBaseline:
      return true;
    case Target::kSse4:
      return __builtin_cpu_supports("x86-64-v2") != 0;
    case Target::kAvx2:
      return __builtin_cpu_supports("x86-64-v3") != 0;
    case Target::kAvx512:
      return __builtin_cpu_supports("x86-64-v4") != 0;
    case Target::kAmx:
      return __builtin_cpu_supports("x86-64-v4") != 0 && has_matrix_units();
  }
  return false;
}
#else
bool is_usable(Target target) { return target == Target::kBaseline; }
#endif

// Names, each with a comma after it.
constexpr std::string_view kBuilt = POPSIM_TARGETS;

std::atomic<bool> kept = false;

std::atomic<Target>& in_use() {
  static std::atomic<Target> target = usable_targets().back();
  return target;
}

}  // namespace

std::string_view name_of(Target target) {
  return kNames.at(static_cast<size_t>(target));
}

const std::vector<Target>& built_targets() {
  static const std::vector<Target> targets = [] {
    std::vector<Target> built;
    for (size_t i = 0; i < kNames.size(); ++i) {
      // The matrix units use the kernels of AVX-512 and a few more.
      const std::string_view group =
          static_cast<Target>(i) == Target::kAmx ? "avx512" : kNames[i];
      if (kBuilt.find(group) != std::string_view::npos) {
        built.push_back(static_cast<Target>(i));
      }
    }
    return built;
  }();
  return targets;
}

const std::vector<Target>& usable_targets() {
  static const std::vector<Target> targets = [] {
    std::vector<Target> usable;
    std::ranges::copy_if(built_targets(), std::back_inserter(usable),
                         is_usable);
    check_user(!usable.empty(), "popsim_torch: this build has kernels for ",
               kBuilt, " none of which this processor can run. Build it here ",
               "(`make build`), or for all (`POPSIM_TARGETS=all make build`).");
    return usable;
  }();
  return targets;
}

Target target() { return in_use(); }

bool has_bfloat16_dots() {
#if defined(__x86_64__)
  return target() == Target::kAvx512 &&
         __builtin_cpu_supports("avx512bf16") != 0;
#else
  return false;
#endif
}

void choose_target(Target target) {
  const std::vector<Target>& usable = usable_targets();
  check_internal(std::ranges::find(usable, target) != usable.end(),
                 "choose_target: this processor cannot run ", name_of(target));
  check_internal(!kept || target == in_use(),
                 "choose_target: the kernels are in use already");
  in_use() = target;
}

void keep_target() { kept = true; }

}  // namespace popsim::processor
