// Tiles of a transposed tensor.
//
// In the row-major order of such a tensor, each value is in another cache line
// than the one before, and each line is needed again much later. A tile has
// whole lines: each of its columns is a piece of memory, each of its rows has
// consecutive positions.
#pragma once

#include <cstdint>
#include <optional>

#include "base/shape.h"

namespace popsim::ops::observe {

// A block stays in the first-level cache while several functions read it.
inline constexpr int64_t kBlock = 2048;

struct Tile {
  int64_t offset = 0;    // of its first value, in elements
  int64_t position = 0;  // of its first value
  int64_t rows = 0;
  int64_t columns = 0;
};

class Tiles {
 public:
  // Returns nothing for a tensor that is read as fast without tiles. Rows are
  // long if positions are needed, else columns are.
  [[nodiscard]] static std::optional<Tiles> of(const Shape& shape,
                                               const Strides& strides,
                                               bool has_positions);

  [[nodiscard]] int64_t count() const;
  [[nodiscard]] Tile operator[](int64_t index) const;
  // From a column to the next one, in elements.
  [[nodiscard]] int64_t column_stride() const { return strides_.back(); }
  // From a row to the next one, in positions; in memory it is 1 element.
  [[nodiscard]] int64_t row_step() const { return steps_[near_]; }

 private:
  Tiles(Shape sizes, Strides strides, size_t near, bool has_positions);

  [[nodiscard]] int64_t parts(size_t axis) const;

  Shape sizes_;
  Strides strides_;  // in memory
  Strides steps_;    // in positions
  size_t near_;      // the axis along which values are neighbours in memory
  Shape tile_;       // the sizes of a tile
};

}  // namespace popsim::ops::observe
