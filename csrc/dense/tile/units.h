// The matrix units of x86 processors (AMX): products of bfloat16 tiles with
// sums in float32.
//
// A block of the output has kBlock x kBlock numbers: two rows of two tiles. For
// every kStepDepth numbers along the depth, a step, and for each part of the
// numbers (parts.h), it takes two tiles of either operand.
#pragma once

#include <cstdint>

namespace popsim::dense {

inline constexpr int64_t kTileRows = 16;
inline constexpr int64_t kTileNumbers = 512;  // 16 rows of 32 bfloat16 numbers
inline constexpr int64_t kStepDepth = 32;
inline constexpr int64_t kBlock = 2 * kTileRows;
inline constexpr int64_t kBlockNumbers = kBlock * kBlock;

// The processor has the units and the process may use them, or they are
// emulated.
[[nodiscard]] bool has_tile_units();

// For tests: what is created from here on, in the whole process, computes with
// units in software, slow but to the same bits (emulated_units.h). Returns
// whether it did before.
bool emulate_tile_units(bool on);

// How many products of tiles they have computed so far.
[[nodiscard]] int64_t num_emulated_products();

// Where the tiles of an operand are, counted in numbers. A tile is 16 rows of
// 32 numbers without gaps, each at a multiple of 64 bytes.
struct TileWalk {
  const uint16_t* data;
  int64_t part;          // from part to part
  int64_t second;        // to the second of the two tiles
  const int64_t* steps;  // [num_steps] to the first tile of each step
};

struct BlockProduct {
  TileWalk a;
  TileWalk b;
  int64_t num_steps;
  bool two_row_tiles;     // or the upper half of the block only
  bool two_column_tiles;  // or the left half of the block only
  float* sums;
  int64_t sum_stride;  // from row to row
};

using BlockFunction = void (*)(const BlockProduct&);

// Adds a block of sums to another one, without gaps between rows.
inline void add_block(const float* from, float* to) {
  for (int64_t i = 0; i < kBlockNumbers; ++i) to[i] += from[i];
}

// For operands of 1, 2 or 3 parts each.
[[nodiscard]] BlockFunction block_function(int num_parts);

// Sets this thread's units up for the length of a scope.
class TileScope {
 public:
  TileScope();
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;
  ~TileScope();
};

}  // namespace popsim::dense
