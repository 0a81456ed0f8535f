// Adding up the partial results of products that are divided over tiles.
//
// PopLibs, poplin/PerformanceEstimation and ConvReducePlan.
#pragma once

#include <cstdint>
#include <vector>

namespace popsim::machine {

// Cycles in which a tile adds up `d` partials of each of `n` outputs.
[[nodiscard]] double reduce_partials(int64_t n, int64_t d, bool float_partials,
                                     bool float_result);

// How many partials each stage of a reduction of `d` partials adds up; empty
// for one partial.
[[nodiscard]] std::vector<int64_t> reduction_depths(int64_t d);

}  // namespace popsim::machine
