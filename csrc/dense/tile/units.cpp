#include "dense/tile/units.h"

#include "base/check.h"

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <utility>

namespace popsim::dense {
namespace {

bool may_use_tile_data() {
  // Of Linux' asm/prctl.h: the state of the tiles must be asked for once.
  constexpr long kRequestPermission = 0x1023;
  constexpr long kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// Eight tiles of 16 rows of 64 bytes, as the instruction wants to read it.
struct alignas(64) Configuration {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  std::array<uint8_t, 14> reserved{};
  std::array<uint16_t, 16> row_bytes{64, 64, 64, 64, 64, 64, 64, 64};
  std::array<uint8_t, 16> rows{16, 16, 16, 16, 16, 16, 16, 16};
};

constexpr Configuration kConfiguration;

// The compiler does not know what memory the tile instructions read.
void memory_barrier() { asm volatile("" ::: "memory"); }

constexpr int64_t kRowBytes = 64;

struct Pair {
  int a = 0;
  int b = 0;
};

// Small products come early, and from one pair to the next one operand stays in
// its tiles where possible. Left out is what is below the rounding of the
// numbers.
template <int kParts, PartProducts kProducts>
constexpr auto pairs_of_parts() {
  constexpr bool kFollowing = kProducts == PartProducts::kFollowing;
  if constexpr (kParts == 1 || kProducts == PartProducts::kFirst) {
    return std::array<Pair, kFollowing ? 0 : 1>{};
  } else if constexpr (kParts == 2 && kFollowing) {
    return std::array{Pair{1, 0}, Pair{0, 1}};
  } else if constexpr (kParts == 2) {
    return std::array{Pair{1, 0}, Pair{0, 0}, Pair{0, 1}};
  } else if constexpr (kFollowing) {
    return std::array{Pair{2, 0}, Pair{1, 0}, Pair{1, 1}, Pair{0, 1},
                      Pair{0, 2}};
  } else {
    return std::array{Pair{2, 0}, Pair{1, 0}, Pair{1, 1},
                      Pair{0, 1}, Pair{0, 2}, Pair{0, 0}};
  }
}

// A block's tiles: output 0 to 3, of a 4 and 5, of b 6 and 7. The instructions
// take their numbers as literals.
template <bool kTwoRows, bool kTwoColumns>
struct Tiles {
  static void clear() {
    _tile_zero(0);
    if constexpr (kTwoColumns) _tile_zero(1);
    if constexpr (kTwoRows) _tile_zero(2);
    if constexpr (kTwoRows && kTwoColumns) _tile_zero(3);
  }

  static void store_sums(float* sums, int64_t stride) {
    const int64_t row_bytes = 4 * stride;
    float* lower = sums + kTileRows * stride;
    _tile_stored(0, sums, row_bytes);
    if constexpr (kTwoColumns) _tile_stored(1, sums + kTileRows, row_bytes);
    if constexpr (kTwoRows) _tile_stored(2, lower, row_bytes);
    if constexpr (kTwoRows && kTwoColumns) {
      _tile_stored(3, lower + kTileRows, row_bytes);
    }
  }

  static void load_a(const uint16_t* a, int64_t second) {
    _tile_loadd(4, a, kRowBytes);
    if constexpr (kTwoRows) _tile_loadd(5, a + second, kRowBytes);
  }

  static void load_b(const uint16_t* b, int64_t second) {
    _tile_loadd(6, b, kRowBytes);
    if constexpr (kTwoColumns) _tile_loadd(7, b + second, kRowBytes);
  }

  static void multiply() {
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kTwoColumns) _tile_dpbf16ps(1, 4, 7);
    if constexpr (kTwoRows) _tile_dpbf16ps(2, 5, 6);
    if constexpr (kTwoRows && kTwoColumns) _tile_dpbf16ps(3, 5, 7);
  }
};

template <int kParts, PartProducts kProducts, typename Tiles>
struct Kernel {
  static constexpr auto kPairs = pairs_of_parts<kParts, kProducts>();

  template <size_t i>
  static void multiply_pair(const TileWalk& a, const TileWalk& b,
                            int64_t step) {
    constexpr Pair kPair = kPairs[i];
    constexpr Pair kBefore = i == 0 ? Pair{-1, -1} : kPairs[i - (i != 0)];
    if constexpr (kPair.a != kBefore.a) {
      Tiles::load_a(a.data + a.steps[step] + kPair.a * a.part, a.second);
    }
    if constexpr (kPair.b != kBefore.b) {
      Tiles::load_b(b.data + b.steps[step] + kPair.b * b.part, b.second);
    }
    Tiles::multiply();
  }

  template <size_t... i>
  static void multiply_step(const TileWalk& a, const TileWalk& b, int64_t step,
                            std::index_sequence<i...> /*pairs*/) {
    (multiply_pair<i>(a, b, step), ...);
  }

  static void run(const BlockProduct& block) {
    memory_barrier();
    Tiles::clear();
    const TileWalk a = block.a;
    const TileWalk b = block.b;
    for (int64_t step = 0; step < block.num_steps; ++step) {
      multiply_step(a, b, step, std::make_index_sequence<kPairs.size()>());
    }
    Tiles::store_sums(block.sums, block.sum_stride);
    memory_barrier();
  }
};

template <int kParts, PartProducts kProducts>
void multiply_block(const BlockProduct& block) {
  if (block.two_row_tiles && block.two_column_tiles) {
    Kernel<kParts, kProducts, Tiles<true, true>>::run(block);
  } else if (block.two_row_tiles) {
    Kernel<kParts, kProducts, Tiles<true, false>>::run(block);
  } else if (block.two_column_tiles) {
    Kernel<kParts, kProducts, Tiles<false, true>>::run(block);
  } else {
    Kernel<kParts, kProducts, Tiles<false, false>>::run(block);
  }
}

template <int kParts>
BlockFunction function_of(PartProducts products) {
  switch (products) {
    case PartProducts::kAll:
      return multiply_block<kParts, PartProducts::kAll>;
    case PartProducts::kFirst:
      return multiply_block<kParts, PartProducts::kFirst>;
    case PartProducts::kFollowing:
      return multiply_block<kParts, PartProducts::kFollowing>;
  }
  return nullptr;
}

}  // namespace

bool has_tile_units() {
  static const bool result = __builtin_cpu_supports("amx-bf16") &&
                             __builtin_cpu_supports("avx512bf16") &&
                             may_use_tile_data();
  return result;
}

BlockFunction block_function(int num_parts, PartProducts products) {
  switch (num_parts) {
    case 1:
      return function_of<1>(products);
    case 2:
      return function_of<2>(products);
    case 3:
      return function_of<3>(products);
    default:
      throw InternalError(join("block_function: ", num_parts, " parts"));
  }
}

TileScope::TileScope() {
  memory_barrier();
  _tile_loadconfig(&kConfiguration);
}

TileScope::~TileScope() { _tile_release(); }

}  // namespace popsim::dense

#else

namespace popsim::dense {

bool has_tile_units() { return false; }

BlockFunction block_function(int /*num_parts*/, PartProducts /*products*/) {
  throw InternalError("block_function: not built for matrix units");
}

TileScope::TileScope() = default;
TileScope::~TileScope() = default;

}  // namespace popsim::dense
#endif
