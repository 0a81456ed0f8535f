// The values of a tensor, one block after the other, in the forms that
// statistics need. Positions are those of the row-major order.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "ops/observe/tiles.h"
#include "ops/operands/floats.h"

namespace popsim::ops::observe {

// Asks for the memory that is a block farther on. What reads a block from the
// cache asks for the next one meanwhile, so computing and loading overlap.
template <typename T>
inline void prefetch_next_block(const T* values) {
  __builtin_prefetch(values + kBlock);
}

// Reads `count` elements, `stride` elements apart, from `source + offset`.
using LoadDoubles = void (*)(const void* source, int64_t offset, int64_t stride,
                             int64_t count, double* out);
// Null if float32 has all values of the dtype.
[[nodiscard]] LoadDoubles doubles_of(DType dtype);

// Values at consecutive positions.
struct Segment {
  int64_t position = 0;  // of the first value
  int64_t begin = 0;     // its index in the block
  int64_t count = 0;
};

struct Block {
  int64_t count = 0;
  std::span<const Segment> segments;
  // Each block has later positions than the one before.
  bool in_order = true;
  // Rounded to float32 if they are 32-bit or 64-bit integers, or float64.
  const float* floats = nullptr;
  // The same values in float64; null unless float32 may round them.
  const double* exact = nullptr;
  // The bits of integers: the lower 32 bits, and what sign extension does not
  // make of them in the upper 32 bits. Null for floating-point values, whose
  // bits are those of `floats`; `upper` is null for integers of 32 bits or
  // less.
  const uint32_t* lower = nullptr;
  const uint32_t* upper = nullptr;
};

// The memory of a task for blocks that are not used in place.
struct BlockMemory {
  std::vector<Segment> segments;
  std::vector<float> floats;
  std::vector<float> columns;  // of a tile
  std::vector<double> exact;
  std::vector<uint32_t> lower;
  std::vector<uint32_t> upper;
};

// Reads input 0 block by block.
class BlockReader {
 public:
  // `bits`: whether blocks need `lower` and `upper`. `positions`: whether they
  // need segments; without, values may be in any order.
  BlockReader(const OpView& op, bool bits, bool positions);

  [[nodiscard]] int64_t num_blocks() const;
  [[nodiscard]] BlockMemory memory() const;
  [[nodiscard]] Block read(const RunContext& context, int64_t index,
                           BlockMemory& memory) const;
  // The value at a position, as float64.
  [[nodiscard]] double value(const RunContext& context, int64_t position) const;

 private:
  Block read_tile(const RunContext& context, int64_t index,
                  BlockMemory& memory) const;
  void read_columns(const RunContext& context, const Tile& tile, int64_t first,
                    int64_t count, float* out) const;
  void read_rows(const RunContext& context, const Tile& tile,
                 BlockMemory& memory) const;
  void read_exact(const RunContext& context, int64_t first, Block& block,
                  BlockMemory& memory) const;
  void add_bits(Block& block, BlockMemory& memory) const;

  graph::TensorId id_;
  DType dtype_;
  int64_t numel_;
  LoadFloats load_floats_;
  FloatReader floats_;
  StridedWalk walk_;
  bool is_exact_;  // float32 has all values
  bool bits_;      // blocks need bits of integers
  bool positions_;
  std::optional<Tiles> tiles_;
};

}  // namespace popsim::ops::observe
