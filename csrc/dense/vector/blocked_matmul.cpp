#include "dense/vector/blocked_matmul.h"

#include <algorithm>
#include <array>
#include <limits>
#include <span>

#include "base/numbers.h"
#include "dense/problem/product_row.h"
#include "dense/vector/pack_rows.h"
#include "dense/vector/register_tile.h"
#include "dense/vector/tile_end.h"
#include "dense/vector/transpose.h"
#include "threads/tasks.h"

namespace popsim::dense {
namespace {

using threads::Range;

// A panel is the columns of a tile. For a section of the depth of this length,
// some panels stay in the second-level cache, and a tile's rows in the
// first-level cache. This was measured: with twice the depth, products whose
// rows are copied take 5 to 15 % longer; half of it gains nothing.
constexpr int64_t kMaxDepth = 512;
constexpr int64_t kCachedFloats = 512 * kMaxDepth;
// The number of products that are added up one after the other. Sums of twice
// as many are less accurate than those of other libraries.
constexpr int64_t kMaxSum = 256;
// Number of blocks of rows that are multiplied with those panels one after the
// other.
constexpr int64_t kGroupBlocks = 8;
constexpr int64_t kRowPadding = 16;

// If the rows of a are columns in memory, they are read element by element in
// place. For this number of panels, that takes less time than copying them;
// with long vectors, whose tiles have more rows, it takes no longer for any
// number of panels.
constexpr int64_t kFewPanels = 8;

// Rows of panels are adjacent after copying: a panel then stays in the
// first-level cache, and in few pages. From this number of rows of a on, that
// saves more time than the copy takes. With long vectors it does so only if the
// rows evict each other: 256 x 1024 x 1024 takes 0.6 of the time.
constexpr int64_t kManyRows = 288;
constexpr int64_t kManyRowsOfLongVectors = 128;

// Whether whole panels are copied.
bool packs_b(const MatmulSpec& spec) {
  if (spec.b.column != 1 || has_bad_rows(spec.b.row)) return true;
  if (kLongVectors) {
    return spec.b.row % kBadStride == 0 && spec.m >= kManyRowsOfLongVectors;
  }
  return spec.m >= kManyRows && spec.b.row > kTileColumns;
}

// Whether rows of a are copied before they are multiplied.
bool copies_a(const MatmulSpec& spec) {
  if (spec.a.column == 1) return spec.a.row % kBadStride == 0 && spec.m > 1;
  return spec.n > kFewPanels * kTileColumns &&
         (!kLongVectors || spec.a.column % kBadStride == 0);
}

// The number of shares along each axis.
struct Grid {
  int64_t items = 1;
  int64_t blocks = 1;  // of rows
  int64_t panels = 1;
};

class BlockedMatmul final : public Matmul {
 public:
  explicit BlockedMatmul(const MatmulSpec& spec)
      : spec_(spec),
        rows_(spec.m, kMaxTileRows),
        panels_(ceil_div(spec.n, kTileColumns)),
        depth_(spec.k, kMaxDepth),
        packs_b_(packs_b(spec)),
        copies_a_(copies_a(spec)),
        keeps_in_c_(spec.beta == 0.0F && !spec.update),
        ends_in_tile_(ends_in_tile(spec)),
        row_(spec_),
        limit_(spec.one_thread
                   ? 1
                   : threads::Shares(threads::multiplications(
                                         spec.batch * spec.m * spec.n * spec.k),
                                     spec.batch * rows_.count * panels_)
                         .limit()) {}

  size_t workspace_bytes() const override {
    const int64_t kept = keeps_here() ? spec_.batch * spec_.m * spec_.n : 0;
    return sizeof(float) * static_cast<size_t>(limit_ * share_floats() + kept);
  }

  using Matmul::run;
  void run(const MatmulOperands& operands) override {
    const int64_t count = limit_ == 1 ? 1 : std::min(limit_, threads::budget());
    const Grid grid = choose_grid(count);
    threads::run_on(count, grid.items * grid.blocks * grid.panels,
                    [&](int64_t share) { run_share(operands, grid, share); });
  }

 private:
  // The part that is computed at a time: items and panels one by one, for some
  // blocks.
  struct Stretch {
    int64_t item;
    Range panels;
    int64_t depth;   // number of the section
    int64_t length;  // length of the section
    int64_t sum;     // number of products that are added up one after the other
    const float* b;  // the first row of the section
    float* packed;   // memory for panels of it
    float* copied;   // memory for rows of a
  };
  // A block of rows, and the place where it is read.
  struct Block {
    int64_t first;
    int64_t rows;
    const float* a;
    int64_t stride;
  };

  [[nodiscard]] int64_t max_depth() const {
    return ceil_div(spec_.k, depth_.count);
  }
  [[nodiscard]] int64_t max_panels() const {
    return std::min(panels_, kCachedFloats / (kTileColumns * max_depth()));
  }
  [[nodiscard]] int64_t a_stride() const { return max_depth() + kRowPadding; }
  // Whether a panel is copied before it is read.
  [[nodiscard]] bool is_packed(int64_t panel) const {
    return packs_b_ || (panel + 1 == panels_ && spec_.n % kTileLanes != 0);
  }
  [[nodiscard]] int64_t packed_floats() const {
    const int64_t panels = packs_b_ ? max_panels() : 1;
    return panels * kTileColumns * max_depth();
  }
  [[nodiscard]] int64_t share_floats() const {
    const int64_t rows = std::min(rows_.count, kGroupBlocks) * kMaxTileRows;
    const int64_t copied =
        copies_a_ ? ceil_div(rows, kTileLanes) * kTileLanes * a_stride() : 0;
    return ceil_div(packed_floats() + copied, kRowPadding) * kRowPadding;
  }
  // Whether the sums between sections of the depth need separate memory.
  [[nodiscard]] bool keeps_here() const {
    return depth_.count > 1 && !keeps_in_c_;
  }

  // The time that the slowest share of a grid takes for an element of the
  // depth, in cycles: for multiplying, and for fetching an element of b or
  // copying one of a.
  [[nodiscard]] int64_t cost(const Grid& grid) const {
    const int64_t blocks = ceil_div(rows_.count, grid.blocks);
    const int64_t panels = ceil_div(panels_, grid.panels);
    const int64_t multiplied = blocks * panels * kMaxTileRows;
    const int64_t copied =
        copies_a_ ? blocks * kMaxTileRows * ceil_div(panels, max_panels()) : 0;
    return ceil_div(spec_.batch, grid.items) *
           (multiplied + panels * kTileColumns + copied);
  }

  [[nodiscard]] Grid choose_grid(int64_t count) const {
    Grid best;
    int64_t least = std::numeric_limits<int64_t>::max();
    for (int64_t items = 1; items <= std::min(count, spec_.batch); ++items) {
      for (int64_t blocks = 1; blocks <= count / items; ++blocks) {
        const Grid grid{items, std::min(blocks, rows_.count),
                        std::min(count / items / blocks, panels_)};
        const int64_t cost = this->cost(grid);
        if (cost < least) best = grid;
        least = std::min(least, cost);
      }
    }
    return best;
  }

  void run_share(const MatmulOperands& operands, const Grid& grid,
                 int64_t share) const {
    float* packed =
        static_cast<float*>(operands.workspace) + share * share_floats();
    const int64_t plane = share % (grid.blocks * grid.panels);
    const Range items = threads::part(
        spec_.batch, share / (grid.blocks * grid.panels), grid.items);
    const Range blocks =
        threads::part(rows_.count, plane / grid.panels, grid.blocks);
    const Range panels =
        threads::part(panels_, plane % grid.panels, grid.panels);
    for (int64_t item = items.begin; item < items.end; ++item) {
      for (int64_t i = panels.begin; i < panels.end; i += max_panels()) {
        const Range some{i, std::min(i + max_panels(), panels.end)};
        for (int64_t depth = 0; depth < depth_.count; ++depth) {
          const int64_t length = depth_.length(depth);
          const Stretch stretch{
              .item = item,
              .panels = some,
              .depth = depth,
              .length = length,
              .sum = ceil_div(length, ceil_div(length, kMaxSum)),
              .b = operands.b_floats() + item * spec_.b.batch +
                   depth_.begin(depth) * spec_.b.row,
              .packed = packed,
              .copied = packed + packed_floats()};
          pack(stretch);
          multiply(operands, stretch, blocks);
        }
      }
    }
  }

  // packed[panel][depth][column] of the panels that are packed, with zeros
  // after the last column.
  void pack(const Stretch& stretch) const {
    if (spec_.b.column == 1) {
      const int64_t first = packs_b_ ? stretch.panels.begin : panels_ - 1;
      if (first >= stretch.panels.end || !is_packed(first)) return;
      const int64_t column = first * kTileColumns;
      const int64_t end = std::min(stretch.panels.end * kTileColumns, spec_.n);
      pack_rows(stretch.b + column, spec_.b.row, end - column, stretch.length,
                stretch.packed);
      return;
    }
    float* to = stretch.packed;
    for (int64_t i = stretch.panels.begin; i < stretch.panels.end; ++i) {
      for (int64_t v = 0; v < kTileColumns; v += kTileLanes) {
        pack_columns(stretch.b, i * kTileColumns + v, stretch.length, to + v);
      }
      to += stretch.length * kTileColumns;
    }
  }

  // Packs a vector of columns.
  void pack_columns(const float* b, int64_t column, int64_t length,
                    float* to) const {
    const int64_t columns =
        std::clamp<int64_t>(spec_.n - column, 0, kTileLanes);
    for (int64_t d = 0; d < length; d += kTileLanes) {
      transpose_padded<kTileLanes>(b + column * spec_.b.column + d,
                                   spec_.b.column, to + d * kTileColumns,
                                   kTileColumns, columns,
                                   std::min(kTileLanes, length - d));
    }
  }

  void multiply(const MatmulOperands& operands, const Stretch& stretch,
                Range blocks) const {
    const float* a = operands.a_floats() + stretch.item * spec_.a.batch +
                     depth_.begin(stretch.depth) * spec_.a.column;
    for (int64_t i = blocks.begin; i < blocks.end; i += kGroupBlocks) {
      const Range group{i, std::min(i + kGroupBlocks, blocks.end)};
      const int64_t first = rows_.begin(group.begin);
      const int64_t last = rows_.begin(group.end);
      const float* from = a + first * spec_.a.row;
      int64_t stride = spec_.a.row;
      if (copies_a_) {
        copy(from, last - first, spec_.m - first, stretch.length,
             stretch.copied);
        from = stretch.copied;
        stride = a_stride();
      }
      std::array<Block, static_cast<size_t>(kGroupBlocks)> read;
      for (int64_t j = group.begin; j < group.end; ++j) {
        const int64_t row = rows_.begin(j);
        read[static_cast<size_t>(j - group.begin)] = {
            row, rows_.length(j), from + (row - first) * stride, stride};
      }
      const std::span of_group(read.data(), static_cast<size_t>(group.size()));
      for (int64_t panel = stretch.panels.begin; panel < stretch.panels.end;
           ++panel) {
        for (const Block& block : of_group) {
          compute(operands, stretch, panel, block);
        }
      }
    }
  }

  // If `a` is stored by columns, this also copies rows after the requested
  // ones, if they exist: whole blocks take less time than parts of blocks.
  void copy(const float* a, int64_t rows, int64_t existing, int64_t length,
            float* to) const {
    const int64_t stride = a_stride();
    if (spec_.a.column == 1) {
      for (int64_t i = 0; i < rows; ++i) {
        std::copy_n(a + i * spec_.a.row, length, to + i * stride);
      }
      return;
    }
    for (int64_t d = 0; d < length; d += kTileLanes) {
      for (int64_t i = 0; i < rows; i += kTileLanes) {
        transpose_block<kTileLanes>(a + d * spec_.a.column + i, spec_.a.column,
                                    to + i * stride + d, stride,
                                    std::min(kTileLanes, length - d),
                                    std::min(kTileLanes, existing - i));
      }
    }
  }

  [[nodiscard]] TileRight right_of(const Stretch& stretch,
                                   int64_t panel) const {
    if (!is_packed(panel)) {
      return {stretch.b + panel * kTileColumns, spec_.b.row};
    }
    const int64_t index = packs_b_ ? panel - stretch.panels.begin : 0;
    return {stretch.packed + index * stretch.length * kTileColumns,
            kTileColumns};
  }

  // Computes a tile.
  void compute(const MatmulOperands& operands, const Stretch& stretch,
               int64_t panel, const Block& block) const {
    const int64_t length = stretch.length;
    const int64_t column = panel * kTileColumns;
    const int64_t columns = std::min(kTileColumns, spec_.n - column);
    const int64_t offset =
        (stretch.item * spec_.m + block.first) * spec_.n + column;
    const TileLeft left{block.a, block.stride, copies_a_ ? 1 : spec_.a.column};
    const TileRight right = right_of(stretch, panel);
    const bool first = stretch.depth == 0;
    const bool last = stretch.depth + 1 == depth_.count;
    float* c = operands.c_floats() + offset;
    float* sums = keeps_here() ? kept(operands) + offset : c;
    const bool whole = columns % kTileLanes == 0;
    if (whole && (!last || ends_in_tile_)) {
      run_deep_tile(left, right, block.rows, columns, length, stretch.sum,
                    last ? ended_output(spec_, operands, offset, column)
                         : TileOutput{.data = sums, .row = spec_.n},
                    first ? TileResult::kStore : TileResult::kAdd);
      return;
    }
    // The order of the sums is the same as in the path above: the operations
    // after a product must not change it.
    TileBuffer tile;
    for (int64_t i = 0; i < block.rows && !first; ++i) {
      std::fill_n(tile.row(i), kTileColumns, 0.0F);
      std::copy_n(sums + i * spec_.n, columns, tile.row(i));
    }
    run_deep_tile(left, right, block.rows, columns, length, stretch.sum,
                  tile.output(), first ? TileResult::kStore : TileResult::kAdd);
    for (int64_t i = 0; i < block.rows; ++i) {
      if (last) {
        row_.finish(operands, tile.row(i), columns, offset + i * spec_.n,
                    column, c + i * spec_.n);
      } else {
        std::copy_n(tile.row(i), columns, sums + i * spec_.n);
      }
    }
  }

  [[nodiscard]] float* kept(const MatmulOperands& operands) const {
    return static_cast<float*>(operands.workspace) + limit_ * share_floats();
  }

  MatmulSpec spec_;
  Pieces rows_;
  int64_t panels_;
  Pieces depth_;
  bool packs_b_;  // else only columns beyond the last whole vector
  bool copies_a_;
  bool keeps_in_c_;
  // Tiles apply the operations after the sums of whole vectors.
  bool ends_in_tile_;
  ProductRow row_;
  int64_t limit_;  // of shares
};

}  // namespace

std::unique_ptr<Matmul> create_blocked_matmul(const MatmulSpec& spec) {
  if (!spec.a.has_unit_stride() || !spec.b.has_unit_stride()) return nullptr;
  return std::make_unique<BlockedMatmul>(spec);
}

}  // namespace popsim::dense
