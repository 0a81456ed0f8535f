#include "dense/vector/register_tile.h"

#include <algorithm>
#include <utility>

#include "base/numbers.h"

namespace popsim::dense {
namespace {

using Vec = at::vec::Vectorized<float>;

template <int kRows, int kVectors, TileResult kResult>
void compute_tile(const TileLeft& left, const TileRight& right, int64_t depth,
                  const TileOutput& out) {
  std::array<std::array<Vec, kVectors>, kRows> sums;
  for (auto& row : sums) row.fill(Vec(0.0F));
  // Three rows share a pointer: that many addresses fit the registers.
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
#pragma GCC unroll 14
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      float* to = first + i * row + v * kTileLanes;
      Vec value = sums[i][v];
      if constexpr (kResult == TileResult::kAdd) {
        value = Vec::loadu(to) + value;
      }
      if constexpr (kResult == TileResult::kUpdate) {
        value = at::vec::fmadd(Vec(-out.rate), value,
                               Vec(out.decay) * Vec::loadu(to));
      }
      value.store(to);
    }
  }
  if (kResult != TileResult::kUpdate || out.sums == nullptr) return;
  // Not beside the loads above: processors take a load for one of a store that
  // is a multiple of 4096 bytes away.
#pragma GCC unroll 14
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      sums[i][v].store(out.sums + i * out.row + v * kTileLanes);
    }
  }
}

using TileFunction = void (*)(const TileLeft&, const TileRight&, int64_t,
                              const TileOutput&);
// By vectors and rows.
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

// By TileResult.
constexpr std::array<const Tiles*, 3> kAllTiles{&kTiles<TileResult::kStore>,
                                                &kTiles<TileResult::kAdd>,
                                                &kTiles<TileResult::kUpdate>};

}  // namespace

void run_tile(const TileLeft& left, const TileRight& right, int64_t rows,
              int64_t columns, int64_t depth, const TileOutput& out,
              TileResult result) {
  const Tiles& tiles = *kAllTiles[static_cast<size_t>(result)];
  const auto vectors = static_cast<size_t>(ceil_div(columns, kTileLanes));
  tiles[vectors - 1][static_cast<size_t>(rows - 1)](left, right, depth, out);
}

void run_deep_tile(const TileLeft& left, const TileRight& right, int64_t rows,
                   int64_t columns, int64_t depth, int64_t longest,
                   const TileOutput& out, TileResult result) {
  run_tile(left, right, rows, columns, std::min(depth, longest), out, result);
  for (int64_t d = longest; d < depth; d += longest) {
    run_tile({left.data + d * left.step, left.row, left.step},
             {right.data + d * right.step, right.step}, rows, columns,
             std::min(depth - d, longest), out, TileResult::kAdd);
  }
}

}  // namespace popsim::dense
