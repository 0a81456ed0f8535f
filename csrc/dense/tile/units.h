// The matrix units of x86 processors (AMX): products of bfloat16 tiles with
// sums in float32.
//
// A block of the output has kBlock x kBlock numbers: two rows of two tiles. For
// every kStepDepth numbers along the depth, which make a step, and for each
// part of the numbers (parts.h), it reads two tiles of each operand.
#pragma once

#include <cstdint>

namespace popsim::dense {

inline constexpr int64_t kTileRows = 16;
inline constexpr int64_t kTileNumbers = 512;  // 16 rows of 32 bfloat16 numbers
inline constexpr int64_t kStepDepth = 32;
inline constexpr int64_t kBlock = 2 * kTileRows;
inline constexpr int64_t kBlockNumbers = kBlock * kBlock;

// Whether the processor has the units and the process may use them, or they are
// emulated.
[[nodiscard]] bool has_tile_units();

// Whether there are no units, but vector instructions multiply tiles of one
// part (dot_kernel.h), kDotRows rows together.
[[nodiscard]] bool has_dot_instructions();
inline constexpr int64_t kDotRows = 8;

// Whether tiles of so many parts can be multiplied: by units, or by those
// instructions.
[[nodiscard]] bool multiplies_tiles(int num_parts);

// For tests: all products that are created after this call, in the whole
// process, emulate the units in software, slowly but with the same bits
// (emulated_units.h). Returns the previous setting.
bool emulate_tile_units(bool on);

// The number of tile products that the emulated units have computed so far.
[[nodiscard]] int64_t num_emulated_products();

// The places of an operand's tiles, counted in numbers. A tile has 16 rows of
// 32 numbers without gaps, and starts at a multiple of 64 bytes.
struct TileWalk {
  const uint16_t* data;
  int64_t part;          // between parts
  int64_t second;        // to the second of the two tiles
  const int64_t* steps;  // [num_steps] place of the first tile of each step
};

struct BlockProduct {
  TileWalk a;
  TileWalk b;
  int64_t num_steps;
  bool two_row_tiles;     // else only the upper half of the block
  bool two_column_tiles;  // else only the left half of the block
  float* sums;
  int64_t sum_stride;  // between rows
};

using BlockFunction = void (*)(const BlockProduct&);

// Adds a block of sums to another block; there are no gaps between rows.
inline void add_block(const float* from, float* to) {
  for (int64_t i = 0; i < kBlockNumbers; ++i) to[i] += from[i];
}

// `num_parts` is the number of parts of each operand: 1, 2 or 3.
[[nodiscard]] BlockFunction block_function(int num_parts);

// A vector of sums has kTileRows columns. Both operands are packed in blocks
// (PartBlock): of the rows, only the first tile of a step counts; of the
// columns, a block has two vectors.
struct RowProduct {
  const uint16_t* a;
  int64_t num_rows;  // only as many sums need be right
  const uint16_t* b;
  int64_t block;  // numbers between blocks of b
  int64_t num_steps;
  float* sums;
  int64_t sum_stride;  // between rows
};

using RowFunction = void (*)(const RowProduct&);

inline constexpr int64_t kMaxRowVectors = 4;

// Multiplies at most kTileRows rows with 1 to kMaxRowVectors vectors of
// columns. The sums have the same bits as those of blocks.
[[nodiscard]] RowFunction row_function(int num_parts, int64_t num_vectors);

// Configures this thread's units for a scope.
class TileScope {
 public:
  TileScope();
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;
  ~TileScope();
};

}  // namespace popsim::dense
