// Images packed for the matrix units, and the lattices of positions that
// convolutions compute with them.
//
// A packed image has the positions of the padded image, one row of a tile for
// each. A product reads its operand at a tap of the kernel by starting some
// rows later, so nothing is copied for each tap. If a convolution has strides,
// positions with equal remainders (a phase) are stored together. A tap that
// goes beyond the end of a row of positions reads the next row; the results
// there are discarded.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "base/numbers.h"
#include "dense/problem/convolution.h"
#include "dense/tile/parts.h"

namespace popsim::dense {

// A point on three axes; if an image has fewer axes, the first ones have size
// 1.
using Point = std::array<int64_t, 3>;

[[nodiscard]] constexpr int64_t product(const Point& values) {
  return values[0] * values[1] * values[2];
}

template <typename Body>
void for_each_point(const Point& count, const Body& body) {
  Point at;
  for (at[0] = 0; at[0] < count[0]; ++at[0]) {
    for (at[1] = 0; at[1] < count[1]; ++at[1]) {
      for (at[2] = 0; at[2] < count[2]; ++at[2]) body(at);
    }
  }
}

// An element of the kernel, and the place of its numbers in a packed image for
// output position 0.
struct Tap {
  int64_t index;  // index in the weight
  Point phase;
  Point shift;
};

// Positions first, first + step, ... of an output; all of them use the same
// taps.
struct Lattice {
  Point first;
  Point step;
  Point count;
  std::vector<Tap> taps;
};

// The layout of a packed band of an image; a band is a section of the output on
// `band_axis`.
struct PackedImage {
  Point size;    // of the image
  Point phases;  // position i is in phase i % phases
  Point before;  // padding before the image
  Point extent;  // positions of a phase, as far as the taps read
  size_t band_axis;

  [[nodiscard]] int64_t phase_positions() const { return product(extent); }
  [[nodiscard]] int64_t num_positions() const {
    return product(phases) * phase_positions();
  }
  // The numbers of a plane: all positions, and an extra tile of zeros that
  // reads may reach.
  [[nodiscard]] int64_t plane() const {
    return (num_positions() + kTileRows) * kStepDepth;
  }
  // The index of `point` in its phase.
  [[nodiscard]] int64_t position(const Point& point) const {
    return (point[0] * extent[1] + point[1]) * extent[2] + point[2];
  }
  // The start of a tap's numbers, in numbers of a plane.
  [[nodiscard]] int64_t offset(const Tap& tap) const;
  // The number of positions from the first to the last one of `count`.
  [[nodiscard]] int64_t reach(const Point& count) const;
};

// A convolution, or its gradient, as products on packed images. At first, one
// band is the whole image.
struct ImageProducts {
  PackedImage source;
  Point output_size;
  std::vector<Lattice> lattices;  // together they are the whole output

  // The number of positions of the lattices on the band's axis.
  [[nodiscard]] int64_t num_rows() const;
  // Divides them into bands of this many positions.
  void cut(int64_t num_rows);
};

[[nodiscard]] ImageProducts forward_products(const ConvolutionSpec& spec);
[[nodiscard]] ImageProducts grad_input_products(const ConvolutionSpec& spec);

// The numbers that a row of a tile has for a position.
struct RowContents {
  int64_t channels;  // of the image
  int64_t group;  // How many of them are in one row: kStepDepth, or kTileRows
                  // together with those at distance `shift` from the position.
  Point shift;

  [[nodiscard]] int64_t num_groups() const { return ceil_div(channels, group); }
};

// Packs a band of a channels-last image. `out` has a plane for each part of
// each group of channels. `band`: the first position of the output on the
// band's axis. Returns the sum of squares, as PackRowFunction does.
[[nodiscard]] float pack_image(const PackedImage& image,
                               const RowContents& contents,
                               PackRowFunction pack_row, int num_parts,
                               const float* data, int64_t band, uint16_t* out);

}  // namespace popsim::dense
