#include "dense/vector/short_matmul.h"

#include <ATen/Parallel.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <array>
#include <utility>

#include "dense/product_row.h"
#include "dense/vector/transpose.h"

namespace popsim::dense {
namespace {

using Vec = at::vec::Vectorized<float>;

constexpr int64_t kLanes = Vec::size();
// A tile of the output stays in registers: kMaxRows x kMaxVectors of them, and
// some for the operands.
constexpr int kMaxRows = kLanes >= 16 ? 14 : 6;
constexpr int kMaxVectors = 2;
constexpr int64_t kTileColumns = kMaxVectors * kLanes;
// Multiplications that are worth waking another thread for.
constexpr int64_t kMinTaskWork = 1 << 18;
// Longer axes are oneDNN's.
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

int64_t round_up(int64_t value, int64_t unit) {
  return (value + unit - 1) / unit * unit;
}

// An operand of a tile. Elements along the depth of the product are `step`
// apart; rows (of the left operand) are `row` apart.
struct Left {
  const float* data;
  int64_t row;
  int64_t step;
};
struct Right {
  const float* data;  // vectors of columns
  int64_t step;
};

struct Output {
  float* data;
  int64_t row;
  float rate = 0.0F;
  float decay = 0.0F;
  float* sums = nullptr;  // also written, where an update wants them kept
};

// sum[i][j] = sum over depth of left[i][d] * right[d][j], for kVectors * kLanes
// columns. The output becomes the sums or, if kUpdate, decay * output - rate *
// sums.
template <int kRows, int kVectors, bool kUpdate>
void compute_tile(Left left, Right right, int64_t depth, Output out) {
  std::array<std::array<Vec, kVectors>, kRows> sums;
  for (auto& row : sums) row.fill(Vec(0.0F));
  // Three rows share a pointer: that many addresses fit the registers.
  constexpr int kPointers = (kRows + 2) / 3;
  std::array<const float*, kPointers> rows;
  for (int p = 0; p < kPointers; ++p) rows[p] = left.data + 3 * p * left.row;
  const float* columns = right.data;
  for (int64_t d = 0; d < depth; ++d) {
    std::array<Vec, kVectors> b;
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      b[v] = Vec::loadu(columns + v * kLanes);
    }
#pragma GCC unroll 14
    for (int i = 0; i < kRows; ++i) {
      const Vec a(rows[i / 3][(i % 3) * left.row]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        sums[i][v] = at::vec::fmadd(a, b[v], sums[i][v]);
      }
    }
#pragma GCC unroll 5
    for (int p = 0; p < kPointers; ++p) rows[p] += left.step;
    columns += right.step;
  }
#pragma GCC unroll 14
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      float* to = out.data + i * out.row + v * kLanes;
      Vec value = sums[i][v];
      if constexpr (kUpdate) {
        value = at::vec::fmadd(Vec(-out.rate), value,
                               Vec(out.decay) * Vec::loadu(to));
      }
      value.store(to);
    }
  }
  if (!kUpdate || out.sums == nullptr) return;
  // Not beside the loads above: processors take a load for one of a store that
  // is a multiple of 4096 bytes away.
#pragma GCC unroll 14
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      sums[i][v].store(out.sums + i * out.row + v * kLanes);
    }
  }
}

using TileFunction = void (*)(Left, Right, int64_t, Output);

using Tiles = std::array<std::array<TileFunction, kMaxRows>, kMaxVectors>;

template <int kVectors, bool kUpdate, int... kRows>
constexpr std::array<TileFunction, kMaxRows> tiles_of(
    std::integer_sequence<int, kRows...>) {
  return {compute_tile<kRows + 1, kVectors, kUpdate>...};
}

constexpr auto kRowCounts = std::make_integer_sequence<int, kMaxRows>();
constexpr Tiles kTiles{tiles_of<1, false>(kRowCounts),
                       tiles_of<2, false>(kRowCounts)};
constexpr Tiles kUpdateTiles{tiles_of<1, true>(kRowCounts),
                             tiles_of<2, true>(kRowCounts)};

struct alignas(64) Tile {
  std::array<float, static_cast<size_t>(kMaxRows* kTileColumns)> floats;

  [[nodiscard]] Output output() { return {floats.data(), kTileColumns}; }
};

// Writes whole vectors, beyond the last column if need be.
void run_tile(Left left, Right right, int64_t rows, int64_t columns,
              int64_t depth, Output out, const Tiles& tiles = kTiles) {
  const auto vectors = static_cast<size_t>((columns + kLanes - 1) / kLanes);
  tiles[vectors - 1][static_cast<size_t>(rows - 1)](left, right, depth, out);
}

// The same for any depth. Longer sums than kMaxDepth are those of their pieces,
// which an update has to wait for.
void run_deep_tile(Left left, Right right, int64_t rows, int64_t columns,
                   int64_t depth, Output out) {
  run_tile(left, right, rows, columns, std::min(depth, kMaxDepth), out);
  Tile piece;
  for (int64_t d = kMaxDepth; d < depth; d += kMaxDepth) {
    run_tile({left.data + d * left.step, left.row, left.step},
             {right.data + d * right.step, right.step}, rows, columns,
             std::min(depth - d, kMaxDepth), piece.output());
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < columns; j += kLanes) {
        float* to = out.data + i * out.row + j;
        const float* from = piece.floats.data() + i * kTileColumns + j;
        (Vec::loadu(to) + Vec::loadu(from)).store(to);
      }
    }
  }
}

// Cuts an axis into equal pieces of at most `limit`.
struct Pieces {
  Pieces(int64_t size, int64_t limit)
      : size(size), count((size + limit - 1) / limit) {}

  [[nodiscard]] int64_t begin(int64_t i) const { return size * i / count; }
  [[nodiscard]] int64_t length(int64_t i) const {
    return begin(i + 1) - begin(i);
  }

  int64_t size;
  int64_t count;
};

// The number of threads of a product is part of its plan.
int64_t num_tasks_for(const MatmulSpec& spec, int64_t pieces) {
  const int64_t work = spec.m * spec.n * spec.k;
  return std::clamp<int64_t>(std::min(work / kMinTaskWork, pieces), 1,
                             at::get_num_threads());
}

template <typename Body>
void for_each_task(int64_t num_tasks, const Body& body) {
  if (num_tasks == 1) {
    body(0);
    return;
  }
  at::parallel_for(0, num_tasks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) body(task);
  });
}

// Few rows, or a short depth: b is row major, each of its rows is read where it
// is. Only columns beyond the last whole vector are copied.
class RowMajorShort final : public Matmul {
 public:
  explicit RowMajorShort(const MatmulSpec& spec)
      : spec_(spec),
        rows_(spec.m, kMaxRows),
        panels_{(spec.n + kTileColumns - 1) / kTileColumns},
        by_rows_(rows_.count >= 2 * at::get_num_threads()),
        row_(spec_),
        num_tasks_(num_tasks_for(spec, std::max(rows_.count, panels_))) {}

  size_t workspace_bytes() const override {
    if (spec_.n % kLanes == 0) return 0;
    return sizeof(float) * static_cast<size_t>(spec_.k * kTileColumns);
  }

  using Matmul::run;
  void run(const MatmulOperands& operands) override {
    auto* tail = static_cast<float*>(operands.workspace);
    if (spec_.n % kLanes != 0) copy_tail(operands.b_floats(), tail);
    for_each_task(num_tasks_, [&](int64_t task) {
      const int64_t total = by_rows_ ? rows_.count : panels_;
      const int64_t begin = total * task / num_tasks_;
      const int64_t end = total * (task + 1) / num_tasks_;
      const int64_t first_row = by_rows_ ? begin : 0;
      const int64_t last_row = by_rows_ ? end : rows_.count;
      const int64_t first_panel = by_rows_ ? 0 : begin;
      const int64_t last_panel = by_rows_ ? panels_ : end;
      Tile tile;
      for (int64_t panel = first_panel; panel < last_panel; ++panel) {
        for (int64_t i = first_row; i < last_row; ++i) {
          compute(operands, tail, i, panel, tile);
        }
      }
    });
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

  void compute(const MatmulOperands& operands, const float* tail, int64_t i,
               int64_t panel, Tile& tile) const {
    const int64_t row = rows_.begin(i);
    const int64_t column = panel * kTileColumns;
    const int64_t columns = std::min(kTileColumns, spec_.n - column);
    const bool whole = columns % kLanes == 0;
    const Right right = whole ? Right{operands.b_floats() + column, spec_.b.row}
                              : Right{tail, kTileColumns};
    const Left left{operands.a_floats() + row * spec_.a.row, spec_.a.row,
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
    if (whole && row_.plain()) {
      run_deep_tile(left, right, rows_.length(i), columns, spec_.k,
                    {out, spec_.n});
      return;
    }
    if (whole && spec_.update && spec_.k <= kMaxDepth) {
      run_tile(left, right, rows_.length(i), columns, spec_.k,
               {out, spec_.n, operands.rate, operands.decay, kept},
               kUpdateTiles);
      return;
    }
    run_deep_tile(left, right, rows_.length(i), columns, spec_.k,
                  tile.output());
    for (int64_t r = 0; r < rows_.length(i); ++r) {
      const int64_t offset = (row + r) * spec_.n + column;
      row_.finish(operands, tile.floats.data() + r * kTileColumns, columns,
                  offset, column, operands.c_floats() + offset);
    }
  }

  MatmulSpec spec_;
  Pieces rows_;
  int64_t panels_;
  bool by_rows_;
  ProductRow row_;
  int64_t num_tasks_;
};

// Few rows, and columns of b that lie in one piece, as the rows of a linear
// layer's weight do. Computes the transposed output, so that b is the operand
// that is read element by element and a, which is small, the one that is
// copied.
class ColumnMajorShort final : public Matmul {
 public:
  explicit ColumnMajorShort(const MatmulSpec& spec)
      : spec_(spec),
        width_(round_up(spec.m, std::max<int64_t>(kLanes, kBlock))),
        blocks_(spec.n, kMaxRows),
        num_tasks_(num_tasks_for(spec, blocks_.count)) {}

  size_t workspace_bytes() const override {
    return sizeof(float) * static_cast<size_t>(num_tasks_ * columns_size());
  }

  using Matmul::run;
  void run(const MatmulOperands& operands) override {
    for_each_task(num_tasks_, [&](int64_t task) {
      // A copy for each task: fetching another core's takes longer than making
      // one.
      float* columns =
          static_cast<float*>(operands.workspace) + task * columns_size();
      transpose(operands.a_floats(), columns);
      Tile tile;
      const int64_t end = blocks_.count * (task + 1) / num_tasks_;
      for (int64_t i = blocks_.count * task / num_tasks_; i < end; ++i) {
        const int64_t first = blocks_.begin(i);
        const Left left{operands.b_floats() + first * spec_.b.column,
                        spec_.b.column, 1};
        for (int64_t row = 0; row < spec_.m; row += kTileColumns) {
          const int64_t rows = std::min(kTileColumns, spec_.m - row);
          run_deep_tile(left, {columns + row, width_}, blocks_.length(i), rows,
                        spec_.k, tile.output());
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
  void store(const Tile& tile, const MatmulOperands& operands, int64_t first,
             int64_t count, int64_t row, int64_t rows) const {
    for (int64_t r = 0; r < rows; ++r) {
      float* out = operands.c_floats() + (row + r) * spec_.n + first;
      for (int64_t j = 0; j < count; ++j) {
        float value = tile.floats[static_cast<size_t>(j * kTileColumns + r)];
        if (spec_.bias) value += operands.bias[first + j];
        if (spec_.beta != 0.0F) value += out[j];
        out[j] = spec_.relu && value < 0.0F ? 0.0F : value;
      }
    }
  }

  MatmulSpec spec_;
  int64_t width_;
  Pieces blocks_;
  int64_t num_tasks_;
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
  if (spec.mask || spec.update) return nullptr;
  const bool column_major = spec.b.column_major(spec.k);
  if (column_major && spec.m >= kMinTransposed && spec.m <= kMaxShort) {
    return std::make_unique<ColumnMajorShort>(spec);
  }
  return nullptr;
}

}  // namespace popsim::dense
