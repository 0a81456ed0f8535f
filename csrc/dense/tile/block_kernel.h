// Multiplies two blocks by a sequence of tile instructions. `Units` are the
// processor's units (processor_units.h) or emulated ones (emulated_units.h).
#pragma once

#include <array>
#include <cstddef>
#include <utility>

#include "dense/tile/units.h"

namespace popsim::dense {

struct Pair {
  int a = 0;
  int b = 0;
};

// The pairs of parts to multiply, small products first. Where possible, two
// consecutive pairs share an operand, which stays in its tiles. Pairs are left
// out if their products are smaller than the rounding error of the numbers.
template <int kParts>
constexpr auto pairs_of_parts() {
  if constexpr (kParts == 1) {
    return std::array{Pair{0, 0}};
  } else if constexpr (kParts == 2) {
    return std::array{Pair{1, 0}, Pair{0, 0}, Pair{0, 1}};
  } else {
    return std::array{Pair{2, 0}, Pair{1, 0}, Pair{1, 1},
                      Pair{0, 1}, Pair{0, 2}, Pair{0, 0}};
  }
}

// The tiles of a block: 0 to 3 for the output, 4 and 5 for a, 6 and 7 for b.
template <bool kTwoRows, bool kTwoColumns, typename Units>
class BlockTiles {
 public:
  void clear() {
    units_.template zero<0>();
    if constexpr (kTwoColumns) units_.template zero<1>();
    if constexpr (kTwoRows) units_.template zero<2>();
    if constexpr (kTwoRows && kTwoColumns) units_.template zero<3>();
  }

  void store_sums(float* sums, int64_t stride) {
    const auto row_bytes = static_cast<int64_t>(sizeof(float)) * stride;
    float* lower = sums + kTileRows * stride;
    units_.template store<0>(sums, row_bytes);
    if constexpr (kTwoColumns) {
      units_.template store<1>(sums + kTileRows, row_bytes);
    }
    if constexpr (kTwoRows) units_.template store<2>(lower, row_bytes);
    if constexpr (kTwoRows && kTwoColumns) {
      units_.template store<3>(lower + kTileRows, row_bytes);
    }
  }

  void load_a(const uint16_t* a, int64_t second) {
    units_.template load<4>(a, kRowBytes);
    if constexpr (kTwoRows) units_.template load<5>(a + second, kRowBytes);
  }

  void load_b(const uint16_t* b, int64_t second) {
    units_.template load<6>(b, kRowBytes);
    if constexpr (kTwoColumns) units_.template load<7>(b + second, kRowBytes);
  }

  void multiply() {
    units_.template multiply<0, 4, 6>();
    if constexpr (kTwoColumns) units_.template multiply<1, 4, 7>();
    if constexpr (kTwoRows) units_.template multiply<2, 5, 6>();
    if constexpr (kTwoRows && kTwoColumns) {
      units_.template multiply<3, 5, 7>();
    }
  }

 private:
  static constexpr int64_t kRowBytes = 64;

  Units units_;
};

template <int kParts, typename Tiles>
class BlockKernel {
 public:
  static void run(const BlockProduct& block) {
    Tiles tiles;
    tiles.clear();
    for (int64_t step = 0; step < block.num_steps; ++step) {
      multiply_step(tiles, block.a, block.b, step,
                    std::make_index_sequence<kPairs.size()>());
    }
    tiles.store_sums(block.sums, block.sum_stride);
  }

 private:
  static constexpr auto kPairs = pairs_of_parts<kParts>();

  template <size_t i>
  static void multiply_pair(Tiles& tiles, const TileWalk& a, const TileWalk& b,
                            int64_t step) {
    constexpr Pair kPair = kPairs[i];
    constexpr Pair kBefore = i == 0 ? Pair{-1, -1} : kPairs[i - (i != 0)];
    if constexpr (kPair.a != kBefore.a) {
      tiles.load_a(a.data + a.steps[step] + kPair.a * a.part, a.second);
    }
    if constexpr (kPair.b != kBefore.b) {
      tiles.load_b(b.data + b.steps[step] + kPair.b * b.part, b.second);
    }
    tiles.multiply();
  }

  template <size_t... i>
  static void multiply_step(Tiles& tiles, const TileWalk& a, const TileWalk& b,
                            int64_t step, std::index_sequence<i...> /*pairs*/) {
    (multiply_pair<i>(tiles, a, b, step), ...);
  }
};

template <int kParts, typename Units>
void multiply_block(const BlockProduct& block) {
  if (block.two_row_tiles && block.two_column_tiles) {
    BlockKernel<kParts, BlockTiles<true, true, Units>>::run(block);
  } else if (block.two_row_tiles) {
    BlockKernel<kParts, BlockTiles<true, false, Units>>::run(block);
  } else if (block.two_column_tiles) {
    BlockKernel<kParts, BlockTiles<false, true, Units>>::run(block);
  } else {
    BlockKernel<kParts, BlockTiles<false, false, Units>>::run(block);
  }
}

template <typename Units>
BlockFunction block_function_of(int num_parts) {
  switch (num_parts) {
    case 1:
      return multiply_block<1, Units>;
    case 2:
      return multiply_block<2, Units>;
    case 3:
      return multiply_block<3, Units>;
    default:
      return nullptr;
  }
}

}  // namespace popsim::dense
