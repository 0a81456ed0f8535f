// The instructions of the map codelet: elementwise functions over blocks.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace popsim::ops {

inline constexpr size_t kMaxMapOperands = 3;

// Computes out[0..n). Operands past the instruction's arity are not read; `out`
// may be one of the operands.
using MapFunction = void (*)(float* out, const float* a, const float* b,
                             const float* c, int64_t n);

struct MapInstruction {
  std::string_view name;
  size_t arity;
  int64_t cost;  // per element; an addition is 1
  // By bit mask of the operands that are one value for the whole block.
  std::array<MapFunction, 1 << kMaxMapOperands> functions;
};

// nullptr for a name that is not an instruction.
[[nodiscard]] const MapInstruction* find_map_instruction(std::string_view name);

}  // namespace popsim::ops
