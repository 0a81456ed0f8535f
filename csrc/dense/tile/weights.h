// Weights of convolutions packed for the matrix units, in the order of the
// depth of products with packed images (image.h).
#pragma once

#include <cstdint>
#include <vector>

#include "dense/tile/image.h"
#include "dense/tile/parts.h"
#include "dense/tile/units.h"

namespace popsim::dense {

// A step along the depth multiplies the channels of a group at a tap. If a row
// of a tile has two positions, it also multiplies those at the tap `beside`.
struct DepthStep {
  int64_t group;
  int64_t tap;     // index in the lattice
  int64_t beside;  // or -1
};

[[nodiscard]] std::vector<DepthStep> depth_steps(const PackedImage& image,
                                                 const RowContents& contents,
                                                 const Lattice& lattice);

// The strides of a weight: of a channel of the result, which is a column of the
// product, and of a channel of the source.
struct WeightStrides {
  int64_t column;
  int64_t channel;
};

// The weights of a lattice, in blocks of kBlock columns.
class TileWeights {
 public:
  TileWeights(const Lattice& lattice, const RowContents& contents,
              const WeightStrides& strides, int64_t num_columns, int num_parts,
              std::vector<DepthStep> depth);

  [[nodiscard]] int64_t num_steps() const {
    return static_cast<int64_t>(depth_.size());
  }
  // Counted in numbers.
  [[nodiscard]] int64_t block_size() const {
    return num_steps() * num_parts_ * 2 * kTileNumbers;
  }
  // The size of the memory for floats that pack() uses.
  [[nodiscard]] int64_t row_bytes() const {
    return 4 * kBlock * kStepDepth * num_steps();
  }

  // Returns the sum of squares, as PackFunction does.
  float pack(const float* weight, int64_t block, float* rows,
             uint16_t* out) const;
  // A packed block.
  [[nodiscard]] TileWalk walk(const uint16_t* block) const {
    return {.data = block,
            .part = 2 * kTileNumbers,
            .second = kTileNumbers,
            .steps = offsets_.data()};
  }

 private:
  void read(const float* column, const DepthStep& step, float* row) const;

  std::vector<Tap> taps_;
  RowContents contents_;
  WeightStrides strides_;
  int64_t num_columns_;
  int num_parts_;
  PackFunction pack_;
  std::vector<DepthStep> depth_;
  std::vector<int64_t> offsets_;
};

}  // namespace popsim::dense
