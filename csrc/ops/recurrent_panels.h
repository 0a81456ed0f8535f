// The product of every step of a recurrent layer: a few rows times a weight
// matrix that stays the same for the whole sequence.
//
// The weight is packed once per run into panels: some columns of the result
// that are computed together, laid out in the order in which they are read.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "ops/recurrent_math.h"

namespace popsim::ops::recurrent {

inline constexpr int64_t kLanes = Vec::size();
inline constexpr int64_t kMaxVectors = 4;
inline constexpr int64_t kMaxPanelFloats = kMaxVectors * kLanes;
// Rows whose products are kept side by side.
inline constexpr int64_t kGroupRows = 48;

struct Range {
  int64_t begin = 0;
  int64_t end = 0;
};

// A panel has one vector of units for each of several gates, or several vectors
// of units where there is one gate.
class Panels {
 public:
  // `depth`: length of the rows that are multiplied.
  Panels(int64_t gates, int64_t hidden, int64_t depth);

  [[nodiscard]] int64_t count() const { return count_; }
  [[nodiscard]] size_t bytes() const {
    return static_cast<size_t>(count_ * panel_floats()) * sizeof(float);
  }
  // From weights of shape (gates * hidden, depth).
  void pack_transposed(const float* weight, float* packed) const;
  // From weights of shape (depth, hidden), for one gate.
  void pack(const float* weight, float* packed) const;

  // Calls visit(row, unit, count, product, stride) for `count` units from
  // `unit` on, at most kLanes; the product of a row with the weights of gate g
  // is at product + g * stride. `a` is the first of all rows.
  template <typename Visit>
  void multiply(const float* packed, const float* a, Range rows, Range panels,
                Visit&& visit) const;
  // Calls visit(row, unit, count) for the same units, without a product.
  template <typename Visit>
  void for_each(Range rows, Range panels, Visit&& visit) const;

 private:
  [[nodiscard]] int64_t width() const { return vectors_ * kLanes; }
  [[nodiscard]] int64_t panel_floats() const { return depth_ * width(); }
  [[nodiscard]] int64_t gate_of(int64_t vector) const {
    return gates_ == 1 ? 0 : vector;
  }
  [[nodiscard]] int64_t unit_of(int64_t panel, int64_t vector) const {
    return gates_ == 1 ? (panel * vectors_ + vector) * kLanes : panel * kLanes;
  }
  void multiply_panel(const float* panel, const float* a, int64_t rows,
                      float* out) const;

  int64_t gates_;
  int64_t hidden_;
  int64_t depth_;
  int64_t vectors_;
  int64_t count_;
};

template <typename Visit>
void Panels::multiply(const float* packed, const float* a, Range rows,
                      Range panels, Visit&& visit) const {
  alignas(64) float products[kGroupRows * kMaxPanelFloats];
  const int64_t pieces = gates_ == 1 ? vectors_ : 1;
  for (int64_t first = rows.begin; first < rows.end; first += kGroupRows) {
    const int64_t count = std::min(kGroupRows, rows.end - first);
    for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
      multiply_panel(packed + panel * panel_floats(), a + first * depth_, count,
                     products);
      for (int64_t row = 0; row < count; ++row) {
        for (int64_t piece = 0; piece < pieces; ++piece) {
          const int64_t unit = unit_of(panel, piece);
          if (unit >= hidden_) break;
          visit(first + row, unit, std::min(kLanes, hidden_ - unit),
                products + row * width() + piece * kLanes, kLanes);
        }
      }
    }
  }
}

template <typename Visit>
void Panels::for_each(Range rows, Range panels, Visit&& visit) const {
  const int64_t begin = unit_of(panels.begin, 0);
  const int64_t end = std::min(hidden_, unit_of(panels.end, 0));
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    for (int64_t unit = begin; unit < end; unit += kLanes) {
      visit(row, unit, std::min(kLanes, end - unit));
    }
  }
}

}  // namespace popsim::ops::recurrent
