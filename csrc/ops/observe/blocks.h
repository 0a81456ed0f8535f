// The values of a tensor in row-major order, one block after the other, in the
// forms that statistics need.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/operands/floats.h"

namespace popsim::ops::observe {

// A block stays in the first-level cache while several functions read it.
inline constexpr int64_t kBlock = 2048;

// Asks for the memory that is a block farther on. What reads a block from the
// cache asks for the next one meanwhile, so computing and loading overlap.
template <typename T>
inline void prefetch_next_block(const T* values) {
  __builtin_prefetch(values + kBlock);
}

struct Block {
  int64_t first = 0;  // position of its first value
  int64_t count = 0;
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
  std::vector<float> floats;
  std::vector<double> exact;
  std::vector<uint32_t> lower;
  std::vector<uint32_t> upper;
};

class BlockReader {
 public:
  // Reads input 0. `bits`: whether blocks need `lower` and `upper`.
  BlockReader(const OpView& op, bool bits);

  [[nodiscard]] BlockMemory memory() const;
  [[nodiscard]] Block read(const RunContext& context, int64_t first,
                           int64_t count, BlockMemory& memory) const;
  // The value at a position, as float64.
  [[nodiscard]] double value(const RunContext& context, int64_t position) const;

 private:
  graph::TensorId id_;
  DType dtype_;
  FloatReader floats_;
  StridedWalk walk_;
  bool is_exact_;  // float32 has all values
  bool bits_;      // blocks need bits of integers
};

}  // namespace popsim::ops::observe
