// The instructions of the map codelet: elementwise functions over blocks.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace popsim::ops {

inline constexpr size_t kMaxMapOperands = 3;

// Computes out[0..n). It reads only the operands that the instruction has;
// `out` may be one of the operands.
using MapFunction = void (*)(float* out, const float* a, const float* b,
                             const float* c, int64_t n);

struct MapInstruction {
  std::string_view name;
  size_t arity;
  int64_t cost;  // per element; an addition costs 1
  // By bit mask of the operands that have one value for the whole block.
  std::array<MapFunction, 1 << kMaxMapOperands> functions;
};

// Returns nullptr if no instruction has this name.
[[nodiscard]] const MapInstruction* find_map_instruction(std::string_view name);

}  // namespace popsim::ops
