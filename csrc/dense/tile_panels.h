// The product of rows with packed panels (vector/panels.h) by the matrix units
// (units.h).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "dense/tile/parts.h"
#include "dense/tile/units.h"
#include "dense/vector/panels.h"

namespace popsim::dense {

// Weights of shape (gates * hidden, depth) or, if `transposed`, (depth,
// hidden).
class TilePanels {
 public:
  // Whether the units can do it and are faster, for rows that are multiplied
  // `times` times with the same weights.
  [[nodiscard]] static bool pays(const Panels& panels, int64_t rows,
                                 int64_t times, int significant_bits);

  TilePanels(const Panels& panels, bool transposed, int significant_bits);

  // For the packed weights, and for the packed rows of each thread.
  [[nodiscard]] size_t weight_bytes() const;
  [[nodiscard]] size_t row_bytes() const;

  // The weights themselves and packed.
  struct Weights {
    const float* plain;
    char* packed;
  };
  void pack(const Weights& weights) const;

  // The rows that are packed and multiplied together.
  [[nodiscard]] int64_t rows_per_block() const { return rows_per_block_; }

  // Like Panels::multiply. `rows` begin at a multiple of rows_per_block(), and
  // end at one or with the last row. `packed_rows`: memory of this thread.
  template <typename... Visits>
  void multiply(const Weights& weights, const float* a, int64_t lda, Range rows,
                Range panels, char* packed_rows, const Visits&... visits) const;

 private:
  // Up to rows_per_block() rows, packed.
  struct Rows {
    PartSource source;
    const uint16_t* packed;
    float squares;
  };
  [[nodiscard]] Rows pack_rows(const float* a, int64_t lda, int64_t count,
                               char* memory) const;
  void pack_panel(const Weights& weights, int64_t panel) const;
  // The weights of a vector of a panel: there may be none.
  [[nodiscard]] PartSource vector_of(const float* weight, int64_t panel,
                                     int64_t vector) const;
  // Writes the products of the rows with a panel; rows are width() apart.
  void multiply_panel(const Weights& weights, const Rows& rows, int64_t panel,
                      float* out) const;
  void multiply_plain(const Weights& weights, const Rows& rows, int64_t panel,
                      float* out) const;

  // Counted in numbers: two vectors of a panel are a block.
  [[nodiscard]] int64_t step_size() const {
    return num_parts_ * 2 * kTileNumbers;
  }
  [[nodiscard]] int64_t block_size() const { return num_steps_ * step_size(); }
  [[nodiscard]] int64_t blocks_per_panel() const {
    return (panels_.vectors() + 1) / 2;
  }
  [[nodiscard]] uint16_t* panel(char* packed, int64_t i) const {
    return reinterpret_cast<uint16_t*>(packed) +
           i * blocks_per_panel() * block_size();
  }
  // The sum of squares of each panel is after the panels.
  [[nodiscard]] float* squares(char* packed) const {
    return reinterpret_cast<float*>(panel(packed, panels_.count()));
  }

  Panels panels_;
  bool transposed_;
  int num_parts_;
  int64_t num_steps_;
  int64_t rows_per_block_;
  PackFunction pack_rows_;
  PackFunction pack_columns_;
  BlockFunction multiply_block_;
  RowFunction multiply_row_;
  std::vector<int64_t> steps_;  // the place of each step of a packed block
};

template <typename... Visits>
void TilePanels::multiply(const Weights& weights, const float* a, int64_t lda,
                          Range rows, Range panels, char* packed_rows,
                          const Visits&... visits) const {
  alignas(64) float products[kBlock * kMaxPanelVectors * kTileRows];
  const TileScope tiles;
  for (int64_t first = rows.begin; first < rows.end; first += rows_per_block_) {
    const int64_t count = std::min(rows_per_block_, rows.end - first);
    const Rows block = pack_rows(a + first * lda, lda, count, packed_rows);
    for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
      multiply_panel(weights, block, panel, products);
      (panels_.visit_products(products, panel, first, count, visits), ...);
    }
  }
}

}  // namespace popsim::dense
