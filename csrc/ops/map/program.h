// The code of a map codelet, parsed from the attributes of its op.
//
// Values are numbered: the op's inputs, then the constants, then the results
// of the instructions in order.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "ops/map/instructions.h"

namespace popsim::ops {

struct MapStatement {
  const MapInstruction* instruction;
  // The first `instruction->arity` entries are values, the others are 0.
  std::array<size_t, kMaxMapOperands> operands;
};

struct MapProgram {
  size_t num_inputs = 0;
  std::vector<float> constants;
  std::vector<MapStatement> code;
  std::vector<size_t> results;  // values written to the outputs, in order

  [[nodiscard]] size_t num_values() const {
    return num_inputs + constants.size() + code.size();
  }
  // The cost of an element, in additions.
  [[nodiscard]] int64_t cost() const;
  // The value that statement `i` defines.
  [[nodiscard]] size_t value_of(size_t i) const {
    return num_inputs + constants.size() + i;
  }
  [[nodiscard]] bool is_constant(size_t value) const {
    return value >= num_inputs && value < value_of(0);
  }
};

// Powers and clamps with constants become the instructions that PyTorch uses
// for them. Throws InternalError with `op_name` and the statement if an
// instruction is unknown, has a wrong number of operands, or uses a value that
// is not defined.
[[nodiscard]] MapProgram parse_map_program(const std::string& op_name,
                                           size_t num_inputs,
                                           std::span<const std::string> code,
                                           std::span<const double> constants,
                                           std::span<const int64_t> results);

}  // namespace popsim::ops
