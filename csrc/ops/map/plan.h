// How a map codelet processes its tensors; the plan is made when the codelet is
// prepared.
//
// The output is divided into blocks that stay in L1 while every instruction
// runs over them. A value has the smallest possible size: one float for the
// whole run, one float per block, or a block of floats. Blocks of floats are
// read and written in place if the layout allows it; the others have a slot of
// scratch memory.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "base/numbers.h"
#include "ops/map/program.h"
#include "ops/operands/floats.h"

namespace popsim::ops {

enum class MapRate : int8_t { kPerRun, kPerBlock, kPerElement };

// Consecutive elements of the output.
struct MapBlock {
  int64_t first;
  int64_t count;
};

// Divides the output into blocks of at most `width` elements. A block never
// extends over two units; a unit is a row of the output, or the whole output.
struct MapGrid {
  int64_t unit = 1;
  int64_t width = 1;
  int64_t num_blocks = 0;

  [[nodiscard]] MapBlock block(int64_t i) const {
    const int64_t pieces = ceil_div(unit, width);
    const int64_t piece = i % pieces;
    return {i / pieces * unit + piece * width,
            std::min(width, unit - piece * width)};
  }
};

struct MapPlan {
  // An input that is converted or gathered into scratch memory.
  struct Load {
    size_t value;
    graph::TensorId tensor;
    FloatGather gather;
    bool per_element;  // otherwise it is one float
  };
  // An input or output that the instructions use in place.
  struct InPlace {
    size_t value;
    graph::TensorId tensor;
    StridedWalk walk;
  };
  struct Step {
    MapFunction function;
    size_t out;
    std::array<size_t, kMaxMapOperands> operands;
    bool per_element;
  };
  struct Store {
    size_t value;
    graph::TensorId tensor;
    StoreFloats store;
    bool uniform;
  };

  MapGrid grid;
  MapProgram program;
  std::vector<Load> loads_per_run;
  std::vector<Step> steps_per_run;
  std::vector<Load> loads;  // the members from here on are per block
  std::vector<InPlace> in_place;
  std::vector<Step> steps;
  std::vector<Store> stores;
  std::vector<std::optional<size_t>> slots;  // by value
  size_t num_slots = 0;
  int64_t cost = 0;  // per element, in additions
};

// Throws InternalError if the op cannot be a map codelet.
[[nodiscard]] MapPlan plan_map(const OpView& op);

}  // namespace popsim::ops
