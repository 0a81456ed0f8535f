#include "dense/vector/short_matmul.h"

#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <array>

#include "base/numbers.h"
#include "dense/problem/product_row.h"
#include "dense/vector/pack_rows.h"
#include "dense/vector/register_tile.h"
#include "dense/vector/tile_end.h"
#include "dense/vector/transpose.h"
#include "threads/tasks.h"

namespace popsim::dense {
namespace {

// Products with longer axes are packed.
constexpr int64_t kMaxShort = 64;
// Products are also packed if they would leave most lanes of a vector empty:
// those with few columns, and, if the output is computed transposed, those with
// few rows.
constexpr int64_t kMinLanes = 8;
constexpr int64_t kMinTransposed = 12;
// The largest number of products that are added up one after the other: the
// error of such a sum grows with its length.
constexpr int64_t kMaxTerms = 1024;
// Rows that evict each other from the caches are copied if at least this number
// of tiles reads them: for fewer tiles, a copy takes as long as it saves.
constexpr int64_t kMinReads = 4;
constexpr int64_t kLineFloats = 16;  // of a cache line
// The number of tiles of a transposed output that are finished together: then
// the operations after their sums mostly use whole vectors.
constexpr int64_t kStripTiles = kLongVectors ? 4 : 8;
constexpr int64_t kStripColumns =
    ceil_div((kStripTiles - 1) * kMaxTileRows + kTileLanes, kTileLanes) *
    kTileLanes;
// The side of the blocks in which a matrix is transposed.
constexpr int kTransposedBlock = 16;
constexpr int64_t kColumnUnit = std::max<int64_t>(kTileLanes, kTransposedBlock);

threads::Shares shares_of(const MatmulSpec& spec, int64_t pieces) {
  return {threads::multiplications(spec.m * spec.n * spec.k), pieces};
}

// For few rows, or a short depth: b is row-major, and each of its rows is read
// in place. Only two kinds of data are copied: columns beyond the last whole
// vector, and rows that would evict each other from the caches before the next
// tile reads them.
class RowMajorShort final : public Matmul {
 public:
  explicit RowMajorShort(const MatmulSpec& spec)
      : spec_(spec),
        rows_(spec.m, kMaxTileRows),
        panels_(ceil_div(spec.n, kTileColumns)),
        row_shares_(shares_of(spec, rows_.count)),
        panel_shares_(shares_of(spec, panels_)),
        copies_b_(has_bad_rows(spec.b.row) && rows_.count >= kMinReads),
        ends_in_tile_(ends_in_tile(spec)),
        row_(spec_) {}

  size_t workspace_bytes() const override {
    if (!copies_b_ && spec_.n % kTileLanes == 0) return 0;
    const int64_t shares = std::max(row_shares_.limit(), panel_shares_.limit());
    return sizeof(float) * static_cast<size_t>(shares * copied_floats());
  }

  using Matmul::run;
  void run(const MatmulOperands& operands) override {
    if (rows_.count >= 2 * threads::budget()) {
      row_shares_.run([&](int64_t share, threads::Range rows) {
        run_share(operands, share, rows, {0, panels_});
      });
    } else {
      panel_shares_.run([&](int64_t share, threads::Range panels) {
        run_share(operands, share, {0, rows_.count}, panels);
      });
    }
  }

 private:
  [[nodiscard]] int64_t copied_floats() const {
    return (copies_b_ ? kPackedPanels : 1) * spec_.k * kTileColumns;
  }
  [[nodiscard]] int64_t columns_of(int64_t panel) const {
    return std::min(kTileColumns, spec_.n - panel * kTileColumns);
  }

  void run_share(const MatmulOperands& operands, int64_t share,
                 threads::Range rows, threads::Range panels) const {
    float* copied =
        static_cast<float*>(operands.workspace) + share * copied_floats();
    TileBuffer tile;
    for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
      const TileRight right =
          right_of(operands.b_floats(), panel, panels, copied);
      for (int64_t i = rows.begin; i < rows.end; ++i) {
        compute(operands, right, i, panel, tile);
      }
    }
  }

  // Copies some of the share's panels when the first of them is needed.
  [[nodiscard]] TileRight right_of(const float* b, int64_t panel,
                                   threads::Range panels, float* copied) const {
    const float* rows = b + panel * kTileColumns;
    if (!copies_b_ && columns_of(panel) % kTileLanes == 0) {
      return {rows, spec_.b.row};
    }
    const int64_t together = copies_b_ ? kPackedPanels : 1;
    const int64_t index = (panel - panels.begin) % together;
    if (index == 0) {
      const int64_t end = std::min(panel + together, panels.end);
      const int64_t columns =
          std::min(end * kTileColumns, spec_.n) - panel * kTileColumns;
      pack_rows(rows, spec_.b.row, columns, spec_.k, copied);
    }
    return {copied + index * spec_.k * kTileColumns, kTileColumns};
  }

  void compute(const MatmulOperands& operands, const TileRight& right,
               int64_t i, int64_t panel, TileBuffer& tile) const {
    const int64_t row = rows_.begin(i);
    const int64_t column = panel * kTileColumns;
    const int64_t columns = columns_of(panel);
    const bool whole = columns % kTileLanes == 0;
    const TileLeft left{operands.a_floats() + row * spec_.a.row, spec_.a.row,
                        spec_.a.column};
    float* out = operands.c_floats() + row * spec_.n + column;
    float* kept = operands.sums == nullptr
                      ? nullptr
                      : operands.sums + (out - operands.c_floats());
    // Prefetches from the outer caches while the tile is computed.
    for (int64_t r = 0; r < rows_.length(i); ++r) {
      for (int64_t j = 0; j < columns; j += kLineFloats) {
        __builtin_prefetch(out + r * spec_.n + j, /*for writing=*/1);
        if (kept != nullptr) {
          __builtin_prefetch(kept + r * spec_.n + j, /*for writing=*/1);
        }
      }
    }
    if (whole && ends_in_tile_) {
      run_deep_tile(
          left, right, rows_.length(i), columns, spec_.k, kMaxTerms,
          ended_output(spec_, operands, row * spec_.n + column, column));
      return;
    }
    if (whole && spec_.update && spec_.k <= kMaxTerms) {
      run_tile(left, right, rows_.length(i), columns, spec_.k,
               {out, spec_.n, operands.rate, operands.decay, kept},
               TileResult::kUpdate);
      return;
    }
    run_deep_tile(left, right, rows_.length(i), columns, spec_.k, kMaxTerms,
                  tile.output());
    for (int64_t r = 0; r < rows_.length(i); ++r) {
      const int64_t offset = (row + r) * spec_.n + column;
      row_.finish(operands, tile.row(r), columns, offset, column,
                  operands.c_floats() + offset);
    }
  }

  MatmulSpec spec_;
  Pieces rows_;
  int64_t panels_;
  threads::Shares row_shares_;
  threads::Shares panel_shares_;
  bool copies_b_;
  // Tiles apply the operations after the sums of whole vectors.
  bool ends_in_tile_;
  ProductRow row_;
};

// For few rows, and contiguous columns of b, which the rows of a linear layer's
// weight are. Computes the transposed output: then b is read element by
// element, and only a, which is small, is copied.
class ColumnMajorShort final : public Matmul {
 public:
  explicit ColumnMajorShort(const MatmulSpec& spec)
      : spec_(spec),
        width_(ceil_div(spec.m, kColumnUnit) * kColumnUnit),
        blocks_(spec.n, kMaxTileRows),
        row_(spec_),
        shares_(shares_of(spec, blocks_.count)) {}

  size_t workspace_bytes() const override {
    return sizeof(float) *
           static_cast<size_t>(shares_.limit() * columns_size());
  }

  using Matmul::run;
  void run(const MatmulOperands& operands) override {
    shares_.run([&](int64_t share, threads::Range blocks) {
      // Each share has its own copy: reading another core's copy takes longer
      // than making one.
      float* columns =
          static_cast<float*>(operands.workspace) + share * columns_size();
      transpose(operands.a_floats(), columns);
      for (int64_t i = blocks.begin; i < blocks.end; i += kStripTiles) {
        run_strip(operands, columns,
                  {i, std::min(i + kStripTiles, blocks.end)});
      }
    });
  }

 private:
  [[nodiscard]] int64_t columns_size() const { return spec_.k * width_; }

  // columns[d][i] = a[i][d], padded with zeros.
  void transpose(const float* a, float* columns) const {
    const MatrixStrides& stride = spec_.a;
    for (int64_t i = 0; i < width_; i += kTransposedBlock) {
      for (int64_t d = 0; d < spec_.k; d += kTransposedBlock) {
        const float* block = a + i * stride.row + d * stride.column;
        float* out = columns + d * width_ + i;
        const int64_t rows = std::min<int64_t>(kTransposedBlock, spec_.m - i);
        const int64_t depth = std::min<int64_t>(kTransposedBlock, spec_.k - d);
        if (stride.column == 1) {
          transpose_padded<kTransposedBlock>(block, stride.row, out, width_,
                                             rows, depth);
        } else {
          copy_block(block, rows, depth, out);
        }
      }
    }
  }

  void copy_block(const float* block, int64_t rows, int64_t depth,
                  float* out) const {
    for (int64_t d = 0; d < depth; ++d) {
      for (int64_t i = 0; i < rows; ++i) {
        out[d * width_ + i] = block[i * spec_.a.row + d * spec_.a.column];
      }
      std::fill(out + d * width_ + rows, out + d * width_ + kTransposedBlock,
                0.0F);
    }
  }

  // Computes all rows of some blocks of the output's columns.
  void run_strip(const MatmulOperands& operands, const float* columns,
                 threads::Range blocks) const {
    // The transpose reads as many rows of a tile as a vector has numbers.
    alignas(64)
        std::array<float, static_cast<size_t>(kTileLanes * kTileColumns)>
            tile{};
    alignas(64)
        std::array<float, static_cast<size_t>(kMaxShort * kStripColumns)>
            strip;
    const int64_t begin = blocks_.begin(blocks.begin);
    for (int64_t i = blocks.begin; i < blocks.end; ++i) {
      const int64_t first = blocks_.begin(i);
      const TileLeft left{operands.b_floats() + first * spec_.b.column,
                          spec_.b.column, 1};
      for (int64_t row = 0; row < spec_.m; row += kTileColumns) {
        const int64_t rows = std::min(kTileColumns, spec_.m - row);
        run_deep_tile(left, {columns + row, width_}, blocks_.length(i), rows,
                      spec_.k, kMaxTerms, {tile.data(), kTileColumns});
        for (int64_t r = 0; r < rows; r += kTileLanes) {
          transpose_square<kTileLanes>(
              tile.data() + r, kTileColumns,
              strip.data() + (row + r) * kStripColumns + first - begin,
              kStripColumns);
        }
      }
    }
    const int64_t count = blocks_.begin(blocks.end) - begin;
    for (int64_t row = 0; row < spec_.m; ++row) {
      const int64_t offset = row * spec_.n + begin;
      row_.finish(operands, strip.data() + row * kStripColumns, count, offset,
                  begin, operands.c_floats() + offset);
    }
  }

  MatmulSpec spec_;
  int64_t width_;
  Pieces blocks_;
  ProductRow row_;
  threads::Shares shares_;
};

}  // namespace

std::unique_ptr<Matmul> create_short_matmul(const MatmulSpec& spec) {
  const bool simple = spec.batch == 1 && !spec.one_thread &&
                      spec.alpha == 1.0F &&
                      (spec.beta == 0.0F || spec.beta == 1.0F);
  if (!simple) return nullptr;
  const bool row_major = spec.b.row_major(spec.n);
  // The fused operations must not affect this choice, because it changes the
  // sums' bits.
  const bool pays = spec.m > 1 && spec.n >= kMinLanes;
  if (row_major && pays && std::min(spec.m, spec.k) <= kMaxShort) {
    return std::make_unique<RowMajorShort>(spec);
  }
  const bool column_major = spec.b.column_major(spec.k);
  if (column_major && spec.m >= kMinTransposed && spec.m <= kMaxShort) {
    return std::make_unique<ColumnMajorShort>(spec);
  }
  return nullptr;
}

}  // namespace popsim::dense
