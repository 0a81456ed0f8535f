// How a convolution is divided over the tiles of an IPU.
//
// PopLibs, poplin/ConvPlan: batch, rows, columns, output channels and input
// channels are divided.
#pragma once

#include <cstdint>
#include <string>

#include "machine/device.h"
#include "machine/formulas/product_unit.h"

namespace popsim::machine {

// Sizes of one convolution; `rows` are all outer axes of an image together.
struct ConvolutionProblem {
  int64_t batch = 1;
  int64_t rows = 1;  // of the result
  int64_t columns = 1;
  int64_t in = 1;  // channels of a group
  int64_t out = 1;
  int64_t groups = 1;
  int64_t kernel_rows = 1;
  int64_t kernel_columns = 1;
  int64_t stride_rows = 1;
  int64_t stride_columns = 1;
  ProductTypes types;
  bool float_result = true;

  friend auto operator<=>(const ConvolutionProblem&,
                          const ConvolutionProblem&) = default;
};

struct ConvolutionPlan {
  int64_t batch = 1;
  int64_t rows = 1;
  int64_t columns = 1;
  int64_t in = 1;
  int64_t out = 1;
  int64_t groups = 1;
  int64_t turns = 1;    // over output channels
  double exchange = 0;  // cycles, of all turns
  double compute = 0;
  double sync = 0;
  double cycles = 0;  // their sum
  double temporary_bytes = 0;

  [[nodiscard]] int64_t tiles() const {
    return batch * rows * columns * in * out * groups;
  }
};

// As plan_matmul().
[[nodiscard]] ConvolutionPlan plan_convolution(
    const Device& device, int64_t tiles, double proportion,
    const ConvolutionProblem& problem);

[[nodiscard]] std::string to_string(const ConvolutionPlan& plan);

}  // namespace popsim::machine
