#include "ops/observe/tiles.h"

#include <algorithm>
#include <span>
#include <utility>

#include "base/numbers.h"
#include "ops/operands/strided_walk.h"

namespace popsim::ops::observe {
namespace {

constexpr int64_t kLine = 16;  // the float32 values of a cache line
constexpr int64_t kMostColumns = kBlock / kLine;

}  // namespace

std::optional<Tiles> Tiles::of(const Shape& shape, const Strides& strides,
                               bool has_positions) {
  MergedAxes axes = merge_axes(shape, std::span(&strides, 1));
  Strides& merged = axes.strides[0];
  if (axes.sizes.back() < kLine || merged.back() < kLine) return std::nullopt;
  for (size_t axis = 0; axis + 1 < merged.size(); ++axis) {
    if (merged[axis] == 1 && axes.sizes[axis] >= kLine / 2) {
      return Tiles(std::move(axes.sizes), std::move(merged), axis,
                   has_positions);
    }
  }
  return std::nullopt;
}

Tiles::Tiles(Shape sizes, Strides strides, size_t near, bool has_positions)
    : sizes_(std::move(sizes)),
      strides_(std::move(strides)),
      steps_(contiguous_strides(sizes_)),
      near_(near),
      tile_(sizes_.size(), 1) {
  int64_t& rows = tile_[near_];
  int64_t& columns = tile_.back();
  if (has_positions) {
    columns = std::min(sizes_.back(), kMostColumns);
    rows = std::min(sizes_[near_], kBlock / columns / kLine * kLine);
  } else {
    rows = std::min(sizes_[near_], kBlock);
    columns = std::min(sizes_.back(), kBlock / rows);
  }
}

int64_t Tiles::parts(size_t axis) const {
  return ceil_div(sizes_[axis], tile_[axis]);
}

int64_t Tiles::count() const {
  int64_t count = 1;
  for (size_t axis = 0; axis < sizes_.size(); ++axis) count *= parts(axis);
  return count;
}

Tile Tiles::operator[](int64_t index) const {
  Tile tile;
  for (size_t axis = sizes_.size(); axis-- > 0;) {
    const int64_t first = index % parts(axis) * tile_[axis];
    index /= parts(axis);
    tile.offset += first * strides_[axis];
    tile.position += first * steps_[axis];
    const int64_t size = std::min(tile_[axis], sizes_[axis] - first);
    if (axis == near_) tile.rows = size;
    if (axis + 1 == sizes_.size()) tile.columns = size;
  }
  return tile;
}

}  // namespace popsim::ops::observe
