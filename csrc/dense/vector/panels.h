// The product of rows with a matrix that is packed into panels. A panel has
// some columns of the result that are computed together, in the order in which
// they are read.
//
// With half partials, a panel adds up its products as the matrix unit of an IPU
// does. A pass has up to 16 products, which are summed in float32, in order.
// The running sum starts at zero; each pass is added to it in float32, and the
// result is rounded to float16.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "dense/vector/half.h"
#include "threads/tasks.h"

namespace popsim::dense {

using threads::Range;

inline constexpr int64_t kLanes = at::vec::Vectorized<float>::size();
inline constexpr int64_t kMaxPanelVectors = 4;
inline constexpr int64_t kMaxPanelFloats = kMaxPanelVectors * kLanes;
// The number of rows whose products are kept next to each other.
inline constexpr int64_t kGroupRows = 48;
inline constexpr int64_t kPassLength = 16;

// The passes along a depth with half partials: some passes of kPassLength
// products, then shorter ones of equal length.
struct Passes {
  int64_t whole = 0;
  int64_t rest = 0;
};

[[nodiscard]] inline Passes passes_of(int64_t depth) {
  return {depth / kPassLength, depth % kPassLength};
}

// Computes `rows` rows of `vectors` vectors with half partials: out = a *
// panel, or, if `add`, continues the running sums in `out`.
void multiply_passes(const float* panel, int64_t vectors, const float* a,
                     int64_t lda, int64_t rows, int64_t depth, Passes passes,
                     bool add, float* out);

// A panel has one vector of units for each of several gates, or, if there is
// one gate, several vectors of units. A matrix without gates counts as one
// gate.
class Panels {
 public:
  // `depth`: length of the rows that are multiplied. `passes`: for half
  // partials.
  Panels(int64_t gates, int64_t hidden, int64_t depth,
         std::optional<Passes> passes = {});

  [[nodiscard]] int64_t count() const { return count_; }
  // The vectors of a panel.
  [[nodiscard]] int64_t vectors() const { return vectors_; }
  [[nodiscard]] int64_t width() const { return vectors_ * kLanes; }
  [[nodiscard]] int64_t hidden() const { return hidden_; }
  [[nodiscard]] int64_t depth() const { return depth_; }
  [[nodiscard]] int64_t gate_of(int64_t vector) const {
    return gates_ == 1 ? 0 : vector;
  }
  [[nodiscard]] int64_t unit_of(int64_t panel, int64_t vector) const {
    return gates_ == 1 ? (panel * vectors_ + vector) * kLanes : panel * kLanes;
  }
  [[nodiscard]] int64_t panel_floats() const { return depth_ * width(); }
  [[nodiscard]] size_t bytes() const {
    return static_cast<size_t>(count_ * panel_floats()) * sizeof(float);
  }
  // Packs weights of shape (gates * hidden, depth).
  void pack_transposed(const float* weight, float* packed) const;
  // Packs weights of shape (depth, hidden), for one gate.
  void pack(const float* weight, float* packed) const;
  // Packs only some panels, of weights whose rows are `stride` apart.
  void pack_transposed(const float* weight, int64_t stride, Range panels,
                       float* packed) const;
  void pack(const float* weight, int64_t stride, Range panels,
            float* packed) const;

  // Calls visit(row, unit, count, product, stride) for `count` units from
  // `unit` on, at most one vector of them; the product of a row with the
  // weights of gate g is at product + g * stride. `a` is the first row; the
  // rows are `lda` apart.
  // Several visits come one after the other for each panel and some rows.
  template <typename... Visits>
  void multiply(const float* packed, const float* a, int64_t lda, Range rows,
                Range panels, const Visits&... visits) const;
  // Does the same for a panel and `count` rows whose products are known, one
  // row after the other.
  template <typename Visit>
  void visit_products(const float* products, int64_t panel, int64_t first,
                      int64_t count, const Visit& visit) const;
  // Calls visit(row, unit, count) for the same units, without a product.
  template <typename Visit>
  void for_each(Range rows, Range panels, Visit&& visit) const;

 private:
  // The shares for packing the panels.
  [[nodiscard]] threads::Shares shares() const;
  void multiply_panel(const float* panel, const float* a, int64_t lda,
                      int64_t rows, float* out) const;

  int64_t gates_;
  int64_t hidden_;
  int64_t depth_;
  std::optional<Passes> passes_;
  int64_t vectors_;
  int64_t count_;
};

template <typename... Visits>
void Panels::multiply(const float* packed, const float* a, int64_t lda,
                      Range rows, Range panels, const Visits&... visits) const {
  alignas(64) float products[kGroupRows * kMaxPanelFloats];
  for (int64_t first = rows.begin; first < rows.end; first += kGroupRows) {
    const int64_t count = std::min(kGroupRows, rows.end - first);
    for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
      multiply_panel(packed + panel * panel_floats(), a + first * lda, lda,
                     count, products);
      (visit_products(products, panel, first, count, visits), ...);
    }
  }
}

template <typename Visit>
void Panels::visit_products(const float* products, int64_t panel, int64_t first,
                            int64_t count, const Visit& visit) const {
  const int64_t pieces = gates_ == 1 ? vectors_ : 1;
  for (int64_t row = 0; row < count; ++row) {
    for (int64_t piece = 0; piece < pieces; ++piece) {
      const int64_t unit = unit_of(panel, piece);
      if (unit >= hidden_) break;
      visit(first + row, unit, std::min(kLanes, hidden_ - unit),
            products + row * width() + piece * kLanes, kLanes);
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

}  // namespace popsim::dense
