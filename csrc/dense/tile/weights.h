// Weights of convolutions packed for the matrix units, in the order in which
// products on packed images (image.h) go along their depth.
#pragma once

#include <cstdint>
#include <vector>

#include "dense/tile/image.h"
#include "dense/tile/parts.h"
#include "dense/tile/units.h"

namespace popsim::dense {

// What a step along the depth multiplies: the channels of a group at a tap, and
// where a row of a tile holds two positions, those at the tap beside it.
struct DepthStep {
  int64_t group;
  int64_t tap;     // in the lattice
  int64_t beside;  // or -1
};

[[nodiscard]] std::vector<DepthStep> depth_steps(const PackedImage& image,
                                                 const RowContents& contents,
                                                 const Lattice& lattice);

// Where the weight of a channel of the result, a column of the product, and of
// a channel of the source is.
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
  // In numbers.
  [[nodiscard]] int64_t block_size() const {
    return num_steps() * num_parts_ * 2 * kTileNumbers;
  }
  // The size of the floats that pack() works with.
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
