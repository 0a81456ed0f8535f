#include "dense/vector/packed_matmul.h"

#include <algorithm>
#include <limits>

#include "base/numbers.h"
#include "dense/product_row.h"
#include "dense/vector/register_tile.h"
#include "dense/vector/transpose.h"
#include "threads/tasks.h"

namespace popsim::dense {
namespace {

using threads::Range;

// A panel is a tile's columns. So many of them, of a stretch of the depth, stay
// in the second-level cache. Measured: longer stretches and fewer panels, or
// the other way round, are slower by 5 %.
constexpr int64_t kMaxDepth = 1024;
constexpr int64_t kMaxPanels = 256 / kTileColumns;
// Products that are added up one after the other. Sums of twice as many are
// less accurate than other libraries'.
constexpr int64_t kMaxSum = 256;
// Blocks of rows that are multiplied with those panels one after the other.
constexpr int64_t kGroupBlocks = 8;
// Rows of the depth that are packed side by side.
constexpr int64_t kPackedRows = 8;
// Rows that are multiples of this apart push each other out of the first-level
// cache.
constexpr int64_t kBadStride = 1024;
constexpr int64_t kRowPadding = 16;

// How many shares there are along each axis.
struct Grid {
  int64_t items = 1;
  int64_t blocks = 1;  // of rows
  int64_t panels = 1;
};

class PackedMatmul final : public Matmul {
 public:
  explicit PackedMatmul(const MatmulSpec& spec)
      : spec_(spec),
        rows_(spec.m, kMaxTileRows),
        panels_(ceil_div(spec.n, kTileColumns)),
        depth_(spec.k, kMaxDepth),
        copies_a_(spec.a.column != 1 ||
                  (spec.a.row % kBadStride == 0 && spec.m > 1)),
        keeps_in_c_(spec.beta == 0.0F && !spec.update),
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
  // What is computed at a time: items and panels one by one, of some blocks.
  struct Stretch {
    int64_t item;
    Range panels;
    int64_t depth;  // which piece of it
    const float* packed;
    float* a;  // memory for a copy of rows of a
  };
  // A block of rows, where it is read.
  struct Block {
    int64_t first;
    int64_t rows;
    const float* a;
    int64_t stride;
  };

  [[nodiscard]] int64_t max_depth() const {
    return ceil_div(spec_.k, depth_.count);
  }
  [[nodiscard]] int64_t a_stride() const { return max_depth() + kRowPadding; }
  [[nodiscard]] int64_t packed_floats() const {
    return std::min(panels_, kMaxPanels) * kTileColumns * max_depth();
  }
  [[nodiscard]] int64_t share_floats() const {
    const int64_t blocks = std::min(rows_.count, kGroupBlocks);
    const int64_t copied = copies_a_ ? blocks * kMaxTileRows * a_stride() : 0;
    return ceil_div(packed_floats() + copied, kRowPadding) * kRowPadding;
  }
  // Whether sums between stretches of the depth need memory of their own.
  [[nodiscard]] bool keeps_here() const {
    return depth_.count > 1 && !keeps_in_c_;
  }

  // The slowest share of a grid takes so long, for each element of the depth:
  // cycles of multiplying, and of packing an element each.
  [[nodiscard]] int64_t cost(const Grid& grid) const {
    const int64_t blocks = ceil_div(rows_.count, grid.blocks);
    const int64_t panels = ceil_div(panels_, grid.panels);
    const int64_t multiplied = blocks * panels * kMaxTileRows;
    const int64_t copied =
        copies_a_ ? blocks * kMaxTileRows * ceil_div(panels, kMaxPanels) : 0;
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
      for (int64_t i = panels.begin; i < panels.end; i += kMaxPanels) {
        const Range some{i, std::min(i + kMaxPanels, panels.end)};
        for (int64_t depth = 0; depth < depth_.count; ++depth) {
          pack(operands, item, some, depth, packed);
          multiply(operands,
                   {item, some, depth, packed, packed + packed_floats()},
                   blocks);
        }
      }
    }
  }

  // packed[panel][depth][column], with zeros behind the last column.
  void pack(const MatmulOperands& operands, int64_t item, Range panels,
            int64_t depth, float* packed) const {
    const float* b = operands.b_floats() + item * spec_.b.batch +
                     depth_.begin(depth) * spec_.b.row;
    const int64_t length = depth_.length(depth);
    if (spec_.b.column == 1) {
      // Some rows at a time, each as far as it is needed: reading them panel by
      // panel would jump from page to page.
      for (int64_t d = 0; d < length; d += kPackedRows) {
        const int64_t count = std::min(kPackedRows, length - d);
        for (int64_t i = panels.begin; i < panels.end; ++i) {
          float* to = packed + ((i - panels.begin) * length + d) * kTileColumns;
          pack_rows(b + d * spec_.b.row, i * kTileColumns, count, to);
        }
      }
      return;
    }
    for (int64_t i = panels.begin; i < panels.end; ++i) {
      for (int64_t v = 0; v < kMaxTileVectors; ++v) {
        pack_columns(b, i * kTileColumns + v * kTileLanes, length,
                     packed + (i - panels.begin) * length * kTileColumns +
                         v * kTileLanes);
      }
    }
  }

  void pack_rows(const float* b, int64_t column, int64_t count,
                 float* to) const {
    const int64_t columns = std::min(kTileColumns, spec_.n - column);
    for (int64_t d = 0; d < count; ++d, to += kTileColumns) {
      const float* from = b + d * spec_.b.row + column;
      if (columns == kTileColumns) {
        std::copy_n(from, kTileColumns, to);
      } else {
        std::copy_n(from, columns, to);
        std::fill(to + columns, to + kTileColumns, 0.0F);
      }
    }
  }

  // A vector of columns.
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
        copy(from, last - first, depth_.length(stretch.depth), stretch.a);
        from = stretch.a;
        stride = a_stride();
      }
      for (int64_t panel = stretch.panels.begin; panel < stretch.panels.end;
           ++panel) {
        for (int64_t j = group.begin; j < group.end; ++j) {
          const int64_t row = rows_.begin(j);
          compute(
              operands, stretch, panel,
              {row, rows_.length(j), from + (row - first) * stride, stride});
        }
      }
    }
  }

  void copy(const float* a, int64_t rows, int64_t length, float* to) const {
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
                                    std::min(kTileLanes, rows - i));
      }
    }
  }

  // A tile.
  void compute(const MatmulOperands& operands, const Stretch& stretch,
               int64_t panel, const Block& block) const {
    const int64_t length = depth_.length(stretch.depth);
    const int64_t column = panel * kTileColumns;
    const int64_t columns = std::min(kTileColumns, spec_.n - column);
    const int64_t offset =
        (stretch.item * spec_.m + block.first) * spec_.n + column;
    const TileLeft left{block.a, block.stride, 1};
    const TileRight right{
        stretch.packed + (panel - stretch.panels.begin) * length * kTileColumns,
        kTileColumns};
    const bool first = stretch.depth == 0;
    const bool last = stretch.depth + 1 == depth_.count;
    float* c = operands.c_floats() + offset;
    float* sums = keeps_here() ? kept(operands) + offset : c;
    const bool whole = columns % kTileLanes == 0;
    if (whole && (!last || row_.plain())) {
      run_deep_tile(left, right, block.rows, columns, length, kMaxSum,
                    {sums, spec_.n},
                    first ? TileResult::kStore : TileResult::kAdd);
      return;
    }
    TileBuffer tile;
    run_deep_tile(left, right, block.rows, columns, length, kMaxSum,
                  tile.output());
    for (int64_t i = 0; i < block.rows; ++i) {
      float* row = tile.row(i);
      float* before = sums + i * spec_.n;
      for (int64_t j = 0; j < columns && !first; ++j)
        row[j] = before[j] + row[j];
      if (last) {
        row_.finish(operands, row, columns, offset + i * spec_.n, column,
                    c + i * spec_.n);
      } else {
        std::copy_n(row, columns, before);
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
  bool copies_a_;
  bool keeps_in_c_;
  ProductRow row_;
  int64_t limit_;  // of shares
};

bool has_unit_stride(const MatrixStrides& strides) {
  return strides.row == 1 || strides.column == 1;
}

}  // namespace

std::unique_ptr<Matmul> create_packed_matmul(const MatmulSpec& spec) {
  if (!has_unit_stride(spec.a) || !has_unit_stride(spec.b)) return nullptr;
  return std::make_unique<PackedMatmul>(spec);
}

}  // namespace popsim::dense
