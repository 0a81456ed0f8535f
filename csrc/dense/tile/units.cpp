#include "dense/tile/units.h"

#include <atomic>

#include "base/check.h"
#include "dense/tile/block_kernel.h"
#include "dense/tile/row_kernel.h"
#include "processor/target.h"

#if defined(__AMX_BF16__) && defined(__AMX_TILE__)
#define POPSIM_PROCESSOR_UNITS 1
#include <array>

#include "dense/tile/processor_units.h"
#endif

#if defined(__AVX512BF16__)
#define POPSIM_DOT_INSTRUCTIONS 1
#include "dense/tile/dot_kernel.h"
#endif

#if defined(__x86_64__)
#include "dense/tile/emulated_units.h"
#endif

namespace popsim::dense {
namespace {

bool processor_has_units() {
  return processor::target() == processor::Target::kAmx;
}

#if defined(POPSIM_PROCESSOR_UNITS)
// Eight tiles of 16 rows of 64 bytes, in the format of the instruction.
struct alignas(64) Configuration {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  std::array<uint8_t, 14> reserved{};
  std::array<uint16_t, 16> row_bytes{64, 64, 64, 64, 64, 64, 64, 64};
  std::array<uint8_t, 16> rows{16, 16, 16, 16, 16, 16, 16, 16};
};

constexpr Configuration kConfiguration;
#endif

std::atomic<bool> emulated = false;

// Returns make<Units>() for the units in use.
template <typename Function, typename Make>
Function choose([[maybe_unused]] const Make& make) {
  Function function = nullptr;
#if defined(__x86_64__)
  if (emulated) function = make.template operator()<EmulatedUnits>();
#endif
#if defined(POPSIM_PROCESSOR_UNITS)
  if (!emulated) function = make.template operator()<ProcessorUnits>();
#endif
  check_internal(function != nullptr, "no matrix units in use");
  return function;
}

}  // namespace

bool has_tile_units() { return emulated || processor_has_units(); }

bool has_dot_instructions() {
#if defined(POPSIM_DOT_INSTRUCTIONS)
  return !has_tile_units() && processor::has_bfloat16_dots();
#else
  return false;
#endif
}

bool multiplies_tiles(int num_parts) {
  return has_tile_units() || (num_parts == 1 && has_dot_instructions());
}

bool emulate_tile_units([[maybe_unused]] bool on) {
#if defined(__x86_64__)
  return emulated.exchange(on);
#else
  return false;
#endif
}

int64_t num_emulated_products() {
#if defined(__x86_64__)
  return EmulatedUnits::num_products();
#else
  return 0;
#endif
}

BlockFunction block_function(int num_parts) {
#if defined(POPSIM_DOT_INSTRUCTIONS)
  if (num_parts == 1 && has_dot_instructions()) return multiply_block_by_dots;
#endif
  return choose<BlockFunction>(
      [&]<typename Units>() { return block_function_of<Units>(num_parts); });
}

RowFunction row_function(int num_parts, int64_t num_vectors) {
#if defined(POPSIM_DOT_INSTRUCTIONS)
  if (num_parts == 1 && has_dot_instructions()) {
    return row_function_by_dots(num_vectors);
  }
#endif
  return choose<RowFunction>([&]<typename Units>() {
    return row_function_of<Units>(num_parts, num_vectors);
  });
}

#if defined(POPSIM_PROCESSOR_UNITS)
TileScope::TileScope() {
  if (!processor_has_units()) return;
  // The compiler does not know which memory the instruction reads.
  asm volatile("" ::: "memory");
  _tile_loadconfig(&kConfiguration);
}

TileScope::~TileScope() {
  if (processor_has_units()) _tile_release();
}
#else
TileScope::TileScope() = default;
TileScope::~TileScope() = default;
#endif

}  // namespace popsim::dense
