#include "ops/observe/top.h"

#include <algorithm>
#include <cmath>

#include "ops/observe/scan.h"

namespace popsim::ops::observe {
namespace {

// How many values are compared at once before each of them is.
constexpr int64_t kTopRun = 64;

// Whether the magnitude is larger, or one of the values is NaN.
bool may_exceed(int32_t magnitude, double limit) {
  return limit < 0.0 || magnitude > kInfinityBits ||
         static_cast<double>(std::bit_cast<float>(magnitude)) > limit;
}

}  // namespace

double Top::limit() const {
  return size_ < entries_.size() ? -1.0 : std::abs(entries_.back().value);
}

void Top::insert(double value, int64_t position) {
  size_t place = size_;
  while (place > 0 && std::abs(entries_[place - 1].value) < std::abs(value)) {
    --place;
  }
  size_ = std::min(size_ + 1, entries_.size());
  const auto at = entries_.begin() + static_cast<ptrdiff_t>(place);
  const auto end = entries_.begin() + static_cast<ptrdiff_t>(size_);
  std::move_backward(at, end - 1, end);
  *at = {value, position};
}

void Top::add(const Block& block, int32_t largest) {
  if (block.exact != nullptr) return add_exact(block);
  if (!may_exceed(largest, limit())) return;
  for (int64_t begin = 0; begin < block.count; begin += kTopRun) {
    const int64_t end = std::min(begin + kTopRun, block.count);
    const int32_t most = largest_magnitude(block.floats + begin, end - begin);
    if (may_exceed(most, limit())) add_floats(block, begin, end);
  }
}

void Top::add_floats(const Block& block, int64_t begin, int64_t end) {
  double least = limit();
  for (int64_t i = begin; i < end; ++i) {
    const auto value = static_cast<double>(block.floats[i]);
    if (!(std::abs(value) > least)) continue;
    insert(value, block.first + i);
    least = limit();
  }
}

void Top::add_exact(const Block& block) {
  double least = limit();
  for (int64_t i = 0; i < block.count; ++i) {
    const double value = block.exact[i];
    if (!(std::abs(value) > least)) continue;
    insert(value, block.first + i);
    least = limit();
  }
}

void Top::add(const Top& later) {
  for (size_t i = 0; i < later.size_; ++i) {
    const Entry& entry = later.entries_[i];
    if (std::abs(entry.value) <= limit()) return;
    insert(entry.value, entry.position);
  }
}

}  // namespace popsim::ops::observe
