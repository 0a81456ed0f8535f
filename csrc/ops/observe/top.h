// The values with the largest magnitudes, and their positions.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/observe/blocks.h"

namespace popsim::ops::observe {

// Takes values in the order of their positions. Of equal magnitudes the first
// ones are kept; NaN is not.
class Top {
 public:
  struct Entry {
    double value = 0.0;
    int64_t position = -1;
  };

  explicit Top(int64_t most) : entries_(static_cast<size_t>(most)) {}

  void clear() { size_ = 0; }
  // `largest`: largest_magnitude() of the block's floats.
  void add(const Block& block, int32_t largest);
  // Adds the entries of later positions.
  void add(const Top& later);

  // The number of entries, of which the largest is the first.
  [[nodiscard]] size_t size() const { return size_; }
  [[nodiscard]] const Entry& operator[](size_t i) const { return entries_[i]; }

 private:
  void add_exact(const Block& block);
  void add_floats(const Block& block, int64_t begin, int64_t end);
  void insert(double value, int64_t position);
  // A value must have a larger magnitude to be taken.
  [[nodiscard]] double limit() const;

  std::vector<Entry> entries_;
  size_t size_ = 0;
};

}  // namespace popsim::ops::observe
