// Convolutions divided into pieces; one thread computes each piece.
//
// oneDNN's own threads would make the order of the sums depend on the number of
// threads. Here the number of pieces depends only on the shape.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "dense/problem/convolution.h"

namespace popsim::dense {

// The shape of a convolution that several pieces compute, for different images,
// rows or channels.
struct PieceShape {
  ConvolutionSpec spec;  // its padding is the padding before the first position
  Extents padding_end;

  bool operator==(const PieceShape&) const = default;
};

// The start of a piece's part of the tensors. Rows are positions of the first
// spatial axis.
struct ConvolutionPiece {
  size_t shape = 0;
  int64_t image = 0;
  int64_t input_row = 0;
  int64_t output_row = 0;
  int64_t channel = 0;  // of the output
  size_t slice = 0;
  int64_t sum = 0;  // number of the piece among those whose sum is the gradient
                    // of the weight
};

struct ConvolutionPieces {
  std::vector<PieceShape> shapes;
  std::vector<ConvolutionPiece> pieces;
  // kGradWeight: the gradient of each slice of the output's channels is the sum
  // of this many pieces' results.
  int64_t num_sums = 1;
  int64_t num_slices = 1;

  // The whole convolution as one piece.
  [[nodiscard]] static ConvolutionPieces whole(const ConvolutionSpec& spec) {
    return {.shapes = {{spec, spec.padding}}, .pieces = {{}}};
  }
};

[[nodiscard]] int64_t num_multiplications(const ConvolutionSpec& spec);
[[nodiscard]] ConvolutionPieces cut_convolution(const ConvolutionSpec& spec,
                                                ConvolutionPass pass);

}  // namespace popsim::dense
