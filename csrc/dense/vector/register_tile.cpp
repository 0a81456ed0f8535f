#include "dense/vector/register_tile.h"

#include <algorithm>
#include <utility>

#include "base/numbers.h"

namespace popsim::dense {
namespace {

using Vec = at::vec::Vectorized<float>;

template <size_t kRows, size_t kVectors>
using TileSums = std::array<std::array<Vec, kVectors>, kRows>;

// Calls body(sum, row, column) for each vector of sums.
template <size_t kRows, size_t kVectors, typename Body>
[[gnu::always_inline]] inline void for_each_sum(TileSums<kRows, kVectors>& sums,
                                                const Body& body) {
#pragma GCC unroll 14
  for (size_t i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (size_t v = 0; v < kVectors; ++v) {
      body(sums[i][v], static_cast<int64_t>(i),
           static_cast<int64_t>(v) * kTileLanes);
    }
  }
}

// The end of sums that are not an update.
template <size_t kRows, size_t kVectors>
[[gnu::always_inline]] inline void end_sums(TileSums<kRows, kVectors>& sums,
                                            const TileOutput& out) {
  if (const float* bias = out.bias) {
    for_each_sum(sums, [&](Vec& sum, int64_t /*row*/, int64_t column) {
      sum = sum + Vec::loadu(bias + column);
    });
  }
  if (out.relu) {
    for_each_sum(sums, [](Vec& sum, int64_t /*row*/, int64_t /*column*/) {
      sum = at::vec::maximum(sum, Vec(0.0F));
    });
  }
  if (const float* mask = out.mask) {
    for_each_sum(sums, [&, stride = out.row](Vec& sum, int64_t row,
                                             int64_t column) {
      const Vec closed = Vec::loadu(mask + row * stride + column) <= Vec(0.0F);
      sum = Vec::blendv(sum, Vec(0.0F), closed);
    });
  }
}

template <int kRows, int kVectors, TileResult kResult>
void compute_tile(const TileLeft& left, const TileRight& right, int64_t depth,
                  const TileOutput& out, bool last) {
  TileSums<kRows, kVectors> sums;
  for (auto& row : sums) row.fill(Vec(0.0F));
  // The lines that the end of the tile reads and writes arrive while it
  // multiplies.
  for (int i = 0; i < kRows; ++i) {
    const int64_t at = i * out.row;
    __builtin_prefetch(out.data + at, 1);
    if (last && out.mask != nullptr) __builtin_prefetch(out.mask + at);
  }
  // Three rows share a pointer, because the registers hold this number of
  // addresses.
  constexpr int kPointers = (kRows + 2) / 3;
  std::array<const float*, kPointers> rows;
  const int64_t row_step = left.row;
  for (int p = 0; p < kPointers; ++p) rows[p] = left.data + 3 * p * row_step;
  const float* columns = right.data;
  const int64_t left_step = left.step;
  const int64_t right_step = right.step;
  for (int64_t d = 0; d < depth; ++d) {
    std::array<Vec, kVectors> b;
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      b[v] = Vec::loadu(columns + v * kTileLanes);
    }
#pragma GCC unroll 14
    for (int i = 0; i < kRows; ++i) {
      const Vec a(rows[i / 3][(i % 3) * row_step]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        sums[i][v] = at::vec::fmadd(a, b[v], sums[i][v]);
      }
    }
#pragma GCC unroll 5
    for (int p = 0; p < kPointers; ++p) rows[p] += left_step;
    columns += right_step;
  }
  float* first = out.data;
  const int64_t row = out.row;
  if constexpr (kResult == TileResult::kAdd) {
    for_each_sum(sums, [&](Vec& sum, int64_t i, int64_t column) {
      sum = Vec::loadu(first + i * row + column) + sum;
    });
  }
  if constexpr (kResult != TileResult::kUpdate) {
    if (last) end_sums(sums, out);
  }
  for_each_sum(sums, [&](Vec& sum, int64_t i, int64_t column) {
    float* to = first + i * row + column;
    if constexpr (kResult == TileResult::kUpdate) {
      at::vec::fmadd(Vec(-out.rate), sum, Vec(out.decay) * Vec::loadu(to))
          .store(to);
    } else {
      sum.store(to);
    }
  });
  if (kResult != TileResult::kUpdate || out.sums == nullptr) return;
  // This is kept apart from the loads above: processors confuse loads and
  // stores whose addresses differ by a multiple of 4096 bytes.
  for_each_sum(sums, [&](Vec& sum, int64_t i, int64_t column) {
    sum.store(out.sums + i * row + column);
  });
}

using TileFunction = void (*)(const TileLeft&, const TileRight&, int64_t,
                              const TileOutput&, bool);
// Indexed by vectors and rows.
using Tiles =
    std::array<std::array<TileFunction, kMaxTileRows>, kMaxTileVectors>;

template <int kVectors, TileResult kResult, int... kRows>
constexpr std::array<TileFunction, kMaxTileRows> tiles_of(
    std::integer_sequence<int, kRows...> /*rows*/) {
  return {compute_tile<kRows + 1, kVectors, kResult>...};
}

template <TileResult kResult>
constexpr Tiles kTiles = [] {
  constexpr std::make_integer_sequence<int, kMaxTileRows> kRows;
  return Tiles{tiles_of<1, kResult>(kRows), tiles_of<2, kResult>(kRows)};
}();

// Indexed by TileResult.
constexpr std::array<const Tiles*, 3> kAllTiles{&kTiles<TileResult::kStore>,
                                                &kTiles<TileResult::kAdd>,
                                                &kTiles<TileResult::kUpdate>};

// Computes a piece of the depth; the operations after the sums come after the
// last piece.
void run_piece(const TileLeft& left, const TileRight& right, int64_t rows,
               int64_t columns, int64_t depth, const TileOutput& out,
               TileResult result, bool last) {
  const Tiles& tiles = *kAllTiles[static_cast<size_t>(result)];
  const auto vectors = static_cast<size_t>(ceil_div(columns, kTileLanes));
  tiles[vectors - 1][static_cast<size_t>(rows - 1)](left, right, depth, out,
                                                    last);
}

}  // namespace

void run_tile(const TileLeft& left, const TileRight& right, int64_t rows,
              int64_t columns, int64_t depth, const TileOutput& out,
              TileResult result) {
  run_piece(left, right, rows, columns, depth, out, result, /*last=*/true);
}

void run_deep_tile(const TileLeft& left, const TileRight& right, int64_t rows,
                   int64_t columns, int64_t depth, int64_t longest,
                   const TileOutput& out, TileResult result) {
  // The arguments themselves describe the first piece: copies of values that
  // the caller has just written would wait for the stores of the previous tile.
  int64_t end = std::min(depth, longest);
  run_piece(left, right, rows, columns, end, out, result, end == depth);
  while (end < depth) {
    const int64_t d = end;
    end = std::min(depth, d + longest);
    run_piece({left.data + d * left.step, left.row, left.step},
              {right.data + d * right.step, right.step}, rows, columns, end - d,
              out, TileResult::kAdd, end == depth);
  }
}

}  // namespace popsim::dense
