// Convolutions cut into pieces, each computed by one thread.
//
// The library's own threads would choose the order of its sums by their number.
// How many pieces there are follows from the shape alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "dense/problem/convolution.h"

namespace popsim::dense {

// A convolution that several pieces compute, of other images, rows or channels.
struct PieceShape {
  ConvolutionSpec spec;  // its padding is that before the first position
  Extents padding_end;

  bool operator==(const PieceShape&) const = default;
};

// Where a piece's part of the tensors begins. Rows are positions of the first
// spatial axis.
struct ConvolutionPiece {
  size_t shape = 0;
  int64_t image = 0;
  int64_t input_row = 0;
  int64_t output_row = 0;
  int64_t channel = 0;  // of the output
  size_t slice = 0;
  int64_t sum = 0;  // of those that make up the gradient of the weight
};

struct ConvolutionPieces {
  std::vector<PieceShape> shapes;
  std::vector<ConvolutionPiece> pieces;
  // kGradWeight: the gradient of each slice of the output's channels is the sum
  // of the results of this many pieces.
  int64_t num_sums = 1;
  int64_t num_slices = 1;

  // Just one piece.
  [[nodiscard]] static ConvolutionPieces whole(const ConvolutionSpec& spec) {
    return {.shapes = {{spec, spec.padding}}, .pieces = {{}}};
  }
};

[[nodiscard]] int64_t num_multiplications(const ConvolutionSpec& spec);
[[nodiscard]] ConvolutionPieces cut_convolution(const ConvolutionSpec& spec,
                                                ConvolutionPass pass);

}  // namespace popsim::dense
