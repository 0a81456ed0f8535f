// The bytes on each tile of an IPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "machine/layout.h"

namespace popsim::machine {

class TileMap {
 public:
  explicit TileMap(int64_t tiles) : bytes_(static_cast<size_t>(tiles)) {}

  // `copies` may be negative.
  void add(const Layout& layout, int64_t copies) {
    const auto size = static_cast<int64_t>(bytes_.size());
    const int64_t change = layout.bytes_per_tile * copies;
    for (int64_t i = 0; i < std::min(layout.tiles, size); ++i) {
      bytes_[static_cast<size_t>((layout.first_tile + i) % size)] += change;
    }
  }
  [[nodiscard]] int64_t fullest() const {
    return std::ranges::max_element(bytes_) - bytes_.begin();
  }
  [[nodiscard]] int64_t most() const { return std::ranges::max(bytes_); }
  [[nodiscard]] double mean() const {
    const auto sum = std::accumulate(bytes_.begin(), bytes_.end(), 0.0);
    return sum / static_cast<double>(bytes_.size());
  }
  [[nodiscard]] const std::vector<int64_t>& bytes() const { return bytes_; }

 private:
  std::vector<int64_t> bytes_;
};

// The bytes of a layout on one tile.
[[nodiscard]] inline int64_t bytes_on(const Layout& layout, int64_t tile,
                                      int64_t tiles) {
  const int64_t place = (tile - layout.first_tile + tiles) % tiles;
  return place < layout.tiles ? layout.bytes_per_tile : 0;
}

}  // namespace popsim::machine
