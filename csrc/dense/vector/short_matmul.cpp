#include "dense/vector/short_matmul.h"

#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <array>

#include "base/numbers.h"
#include "dense/product_row.h"
#include "dense/vector/register_tile.h"
#include "dense/vector/tile_end.h"
#include "dense/vector/transpose.h"
#include "threads/tasks.h"

namespace popsim::dense {
namespace {

// Products with longer axes are packed.
constexpr int64_t kMaxShort = 64;
// So are products that would leave most lanes of a vector empty: those with few
// columns, and, where the output is computed transposed, with few rows.
constexpr int64_t kMinLanes = 8;
constexpr int64_t kMinTransposed = 12;
// Products that are added up one after the other: the error of such a sum grows
// with its length.
constexpr int64_t kMaxDepth = 1024;
constexpr int64_t kLineFloats = 16;  // of a cache line
// Side of the blocks that a matrix is transposed in.
constexpr int kBlock = 16;
constexpr int64_t kColumnUnit = std::max<int64_t>(kTileLanes, kBlock);

threads::Shares shares_of(const MatmulSpec& spec, int64_t pieces) {
  return {threads::multiplications(spec.m * spec.n * spec.k), pieces};
}

// Few rows, or a short depth: b is row major, each of its rows is read where it
// is. Only columns beyond the last whole vector are copied.
class RowMajorShort final : public Matmul {
 public:
  explicit RowMajorShort(const MatmulSpec& spec)
      : spec_(spec),
        rows_(spec.m, kMaxTileRows),
        panels_(ceil_div(spec.n, kTileColumns)),
        row_shares_(shares_of(spec, rows_.count)),
        panel_shares_(shares_of(spec, panels_)),
        ends_in_tile_(ends_in_tile(spec)),
        row_(spec_) {}

  size_t workspace_bytes() const override {
    if (spec_.n % kTileLanes == 0) return 0;
    return sizeof(float) * static_cast<size_t>(spec_.k * kTileColumns);
  }

  using Matmul::run;
  void run(const MatmulOperands& operands) override {
    auto* tail = static_cast<float*>(operands.workspace);
    if (spec_.n % kTileLanes != 0) copy_tail(operands.b_floats(), tail);
    if (rows_.count >= 2 * threads::budget()) {
      row_shares_.run([&](int64_t /*share*/, threads::Range rows) {
        run_part(operands, tail, rows, {0, panels_});
      });
    } else {
      panel_shares_.run([&](int64_t /*share*/, threads::Range panels) {
        run_part(operands, tail, {0, rows_.count}, panels);
      });
    }
  }

 private:
  void copy_tail(const float* b, float* tail) const {
    const int64_t begin = (panels_ - 1) * kTileColumns;
    const int64_t count = spec_.n - begin;
    for (int64_t d = 0; d < spec_.k; ++d) {
      float* row = tail + d * kTileColumns;
      std::copy_n(b + d * spec_.b.row + begin, count, row);
      std::fill(row + count, row + kTileColumns, 0.0F);
    }
  }

  void run_part(const MatmulOperands& operands, const float* tail,
                threads::Range rows, threads::Range panels) const {
    TileBuffer tile;
    for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
      for (int64_t i = rows.begin; i < rows.end; ++i) {
        compute(operands, tail, i, panel, tile);
      }
    }
  }

  void compute(const MatmulOperands& operands, const float* tail, int64_t i,
               int64_t panel, TileBuffer& tile) const {
    const int64_t row = rows_.begin(i);
    const int64_t column = panel * kTileColumns;
    const int64_t columns = std::min(kTileColumns, spec_.n - column);
    const bool whole = columns % kTileLanes == 0;
    const TileRight right =
        whole ? TileRight{operands.b_floats() + column, spec_.b.row}
              : TileRight{tail, kTileColumns};
    const TileLeft left{operands.a_floats() + row * spec_.a.row, spec_.a.row,
                        spec_.a.column};
    float* out = operands.c_floats() + row * spec_.n + column;
    float* kept = operands.sums == nullptr
                      ? nullptr
                      : operands.sums + (out - operands.c_floats());
    // On its way from the outer caches while the tile is computed.
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
          left, right, rows_.length(i), columns, spec_.k, kMaxDepth,
          ended_output(spec_, operands, row * spec_.n + column, column));
      return;
    }
    if (whole && spec_.update && spec_.k <= kMaxDepth) {
      run_tile(left, right, rows_.length(i), columns, spec_.k,
               {out, spec_.n, operands.rate, operands.decay, kept},
               TileResult::kUpdate);
      return;
    }
    run_deep_tile(left, right, rows_.length(i), columns, spec_.k, kMaxDepth,
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
  bool ends_in_tile_;  // what follows the sums of whole vectors of columns
  ProductRow row_;
};

// Few rows, and columns of b that lie in one piece, as the rows of a linear
// layer's weight do. Computes the transposed output, so that b is the operand
// that is read element by element and a, which is small, the one that is
// copied.
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
      // A copy for each share: fetching another core's takes longer than making
      // one.
      float* columns =
          static_cast<float*>(operands.workspace) + share * columns_size();
      transpose(operands.a_floats(), columns);
      TileBuffer tile;
      for (int64_t i = blocks.begin; i < blocks.end; ++i) {
        const int64_t first = blocks_.begin(i);
        const TileLeft left{operands.b_floats() + first * spec_.b.column,
                            spec_.b.column, 1};
        for (int64_t row = 0; row < spec_.m; row += kTileColumns) {
          const int64_t rows = std::min(kTileColumns, spec_.m - row);
          run_deep_tile(left, {columns + row, width_}, blocks_.length(i), rows,
                        spec_.k, kMaxDepth, tile.output());
          store(tile, operands, first, blocks_.length(i), row, rows);
        }
      }
    });
  }

 private:
  [[nodiscard]] int64_t columns_size() const { return spec_.k * width_; }

  // columns[d][i] = a[i][d], padded with zeros.
  void transpose(const float* a, float* columns) const {
    const MatrixStrides& stride = spec_.a;
    for (int64_t i = 0; i < width_; i += kBlock) {
      for (int64_t d = 0; d < spec_.k; d += kBlock) {
        const float* block = a + i * stride.row + d * stride.column;
        float* out = columns + d * width_ + i;
        const int64_t rows = std::min<int64_t>(kBlock, spec_.m - i);
        const int64_t depth = std::min<int64_t>(kBlock, spec_.k - d);
        if (stride.column == 1) {
          transpose_padded<kBlock>(block, stride.row, out, width_, rows, depth);
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
      std::fill(out + d * width_ + rows, out + d * width_ + kBlock, 0.0F);
    }
  }

  // Writes output columns [first, first + count) of rows [row, row + rows).
  void store(TileBuffer& tile, const MatmulOperands& operands, int64_t first,
             int64_t count, int64_t row, int64_t rows) const {
    alignas(64) std::array<float, static_cast<size_t>(kColumnUnit)> sums;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t j = 0; j < count; ++j) {
        sums[static_cast<size_t>(j)] = tile.row(j)[r];
      }
      const int64_t offset = (row + r) * spec_.n + first;
      row_.finish(operands, sums.data(), count, offset, first,
                  operands.c_floats() + offset);
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
  // What rides on the product has no say: it must not change the sums' bits.
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
