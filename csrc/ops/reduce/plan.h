// How a reduction processes its input; the plan is made when the op is
// prepared.
//
// The axis with the smallest stride is the innermost one, whatever its place in
// the shape. If this axis is kept, whole rows are added to a row of results; if
// it is reduced, each row gives one value.
#pragma once

#include <cstdint>

#include "ops/op_def.h"
#include "ops/operands/strided_walk.h"

namespace popsim::ops {

struct ReducePlan {
  int64_t width = 1;  // elements of a row
  int64_t stride = 1;
  bool keeps_width = false;   // the results are as wide as the rows
  int64_t result_stride = 1;  // of the output along a row
  int64_t num_results = 1;    // rows (or values) of the output
  int64_t rows_per_result = 1;
  StridedWalk results_in;   // by result: the start of its rows in the input
  StridedWalk results_out;  // by result: its place in the output
  StridedWalk rows;         // by row of a result
  bool dense_rows = false;  // the rows of a result are adjacent in memory
};

// `axes` are the axes that are reduced.
[[nodiscard]] ReducePlan plan_reduce(const graph::Tensor& input,
                                     const std::vector<int64_t>& axes);

}  // namespace popsim::ops
