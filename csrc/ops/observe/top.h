// The values with the largest magnitudes, and their positions.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/observe/blocks.h"

namespace popsim::ops::observe {

// Of equal magnitudes those at the first positions are kept; NaN is not.
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
  void add(const Top& other);

  // The number of entries, of which the largest is the first.
  [[nodiscard]] size_t size() const { return size_; }
  [[nodiscard]] const Entry& operator[](size_t i) const { return entries_[i]; }

 private:
  template <typename T>
  void add_each(const T* values, int64_t count, int64_t position);
  void add_floats(const Block& block, const Segment& segment);
  // Adds a value whose magnitude is not below limit().
  void insert(double value, int64_t position);
  [[nodiscard]] double limit() const;

  std::vector<Entry> entries_;
  size_t size_ = 0;
};

}  // namespace popsim::ops::observe
