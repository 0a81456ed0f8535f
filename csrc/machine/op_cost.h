// The cost of one run of an op.
#pragma once

#include <cstdint>
#include <string>

#include "machine/constants.h"

namespace popsim::machine {

struct OpCost {
  double compute = 0;   // cycles
  double exchange = 0;  // cycles; data that move between the tiles of an IPU
  double sync = 0;      // cycles
  double glue = 0;      // cycles of control code
  int64_t temporary_bytes = 0;  // on the fullest tile, while the op runs
  // Whether its code includes an exchange, which is larger.
  bool exchanges = false;
  Grade grade = Grade::kPublished;
  std::string formula;  // "elementwise", "matmul", ..; empty: no formula
  std::string plan;     // how a product or convolution is divided; may be empty

  [[nodiscard]] double cycles() const {
    return compute + exchange + sync + glue;
  }
  // Steps that follow each other: temporaries do not add up.
  OpCost& operator+=(const OpCost& next);
  // The same steps, `times` times.
  OpCost& operator*=(double times);
};

}  // namespace popsim::machine
