#include "ops/observe/top.h"

#include <algorithm>
#include <cmath>

#include "ops/observe/scan.h"

namespace popsim::ops::observe {
namespace {

// How many values are compared at once before each of them is.
constexpr int64_t kTopRun = 64;

// Whether one of some values, whose largest magnitude has these bits, may be
// taken. Equal magnitudes are only if earlier positions may follow later ones.
bool may_be_taken(int32_t largest, double limit, bool in_order) {
  if (limit < 0.0 || largest > kInfinityBits) return true;
  const auto magnitude = static_cast<double>(std::bit_cast<float>(largest));
  return in_order ? magnitude > limit : magnitude >= limit;
}

bool precedes(const Top::Entry& one, const Top::Entry& other) {
  const double magnitude = std::abs(one.value);
  const double against = std::abs(other.value);
  return magnitude > against ||
         (magnitude == against && one.position < other.position);
}

}  // namespace

double Top::limit() const {
  return size_ < entries_.size() ? -1.0 : std::abs(entries_.back().value);
}

void Top::insert(double value, int64_t position) {
  const Entry entry{value, position};
  size_t place = size_;
  while (place > 0 && precedes(entry, entries_[place - 1])) --place;
  if (place == entries_.size()) return;
  size_ = std::min(size_ + 1, entries_.size());
  const auto at = entries_.begin() + static_cast<ptrdiff_t>(place);
  const auto end = entries_.begin() + static_cast<ptrdiff_t>(size_);
  std::move_backward(at, end - 1, end);
  *at = entry;
}

void Top::add(const Block& block, int32_t largest) {
  if (block.exact == nullptr &&
      !may_be_taken(largest, limit(), block.in_order)) {
    return;
  }
  for (const Segment& segment : block.segments) {
    if (block.exact == nullptr) {
      add_floats(block, segment);
    } else {
      add_each(block.exact + segment.begin, segment.count, segment.position);
    }
  }
}

void Top::add_floats(const Block& block, const Segment& segment) {
  for (int64_t i = 0; i < segment.count; i += kTopRun) {
    const float* values = block.floats + segment.begin + i;
    const int64_t count = std::min(kTopRun, segment.count - i);
    const int32_t largest = largest_magnitude(values, count);
    if (may_be_taken(largest, limit(), block.in_order)) {
      add_each(values, count, segment.position + i);
    }
  }
}

template <typename T>
void Top::add_each(const T* values, int64_t count, int64_t position) {
  double least = limit();
  for (int64_t i = 0; i < count; ++i) {
    const auto value = static_cast<double>(values[i]);
    if (!(std::abs(value) >= least)) continue;
    insert(value, position + i);
    least = limit();
  }
}

void Top::add(const Top& other) {
  for (size_t i = 0; i < other.size_; ++i) {
    insert(other.entries_[i].value, other.entries_[i].position);
  }
}

}  // namespace popsim::ops::observe
