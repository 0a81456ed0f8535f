// Multiplies tiles of one part by vector instructions: each adds the products
// of two pairs of bfloat16 numbers to every number of a vector (VDPBF16PS). It
// is for processors without matrix units. Like those, the instruction treats
// numbers below 2^-126 as zero (parts.h).
#pragma once

#include <immintrin.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "dense/tile/units.h"

namespace popsim::dense {

// kDotRows rows of tiles times one or two vectors of columns: the sums stay in
// registers, and loading the operands takes less time than multiplying.
template <size_t kVectors>
class DotKernel {
 public:
  // The first tile of each step: `a` starts at the first of the rows.
  using Columns = std::array<const uint16_t*, kVectors>;

  // `place` returns where a step starts: of a and of b, in numbers.
  template <typename Place>
  static void run(const uint16_t* a, const Columns& b, int64_t num_steps,
                  const Place& place, float* sums, int64_t sum_stride) {
    Sums rows;
    for (Row& row : rows) row = {};
    for (int64_t step = 0; step < num_steps; ++step) {
      const auto [at_a, at_b] = place(step);
      for (int64_t pair = 0; pair < kTileRows; ++pair) {
        add_pair(a + at_a + 2 * pair, b, at_b + pair * kStepDepth, rows);
      }
    }
    for (const Row& row : rows) {
      for (size_t j = 0; j < kVectors; ++j) {
        _mm512_storeu_ps(sums + static_cast<int64_t>(j) * kTileRows,
                         row.vectors[j]);
      }
      sums += sum_stride;
    }
  }

 private:
  struct Row {
    __m512 vectors[kVectors];
  };
  using Sums = std::array<Row, static_cast<size_t>(kDotRows)>;

  static __m512bh load(const uint16_t* numbers) {
    return reinterpret_cast<__m512bh>(_mm512_load_si512(numbers));
  }

  // The same pair for all columns.
  static __m512bh repeat(const uint16_t* pair) {
    int32_t both = 0;
    std::memcpy(&both, pair, sizeof(both));
    return reinterpret_cast<__m512bh>(_mm512_set1_epi32(both));
  }

  static void add_pair(const uint16_t* a, const Columns& b, int64_t at_b,
                       Sums& rows) {
    __m512bh columns[kVectors];
#pragma GCC unroll 2
    for (size_t j = 0; j < kVectors; ++j) columns[j] = load(b[j] + at_b);
#pragma GCC unroll 8
    for (Row& row : rows) {
      const __m512bh number = repeat(a);
#pragma GCC unroll 2
      for (size_t j = 0; j < kVectors; ++j) {
        row.vectors[j] = _mm512_dpbf16_ps(row.vectors[j], number, columns[j]);
      }
      a += kStepDepth;
    }
  }
};

// The steps of a's and b's walks.
inline auto places_of(const BlockProduct& block) {
  return [&block](int64_t step) {
    return std::array{block.a.steps[step], block.b.steps[step]};
  };
}

inline void multiply_block_by_dots(const BlockProduct& block) {
  using One = DotKernel<1>;
  using Two = DotKernel<2>;
  const int64_t num_rows = block.two_row_tiles ? kBlock : kTileRows;
  for (int64_t row = 0; row < num_rows; row += kDotRows) {
    const uint16_t* a = block.a.data + row / kTileRows * block.a.second +
                        row % kTileRows * kStepDepth;
    float* sums = block.sums + row * block.sum_stride;
    const uint16_t* b = block.b.data;
    if (block.two_column_tiles) {
      Two::run(a, {b, b + block.b.second}, block.num_steps, places_of(block),
               sums, block.sum_stride);
    } else {
      One::run(a, {b}, block.num_steps, places_of(block), sums,
               block.sum_stride);
    }
  }
}

inline void multiply_rows_by_dots(const RowProduct& product,
                                  int64_t num_vectors) {
  const auto place = [](int64_t step) {
    const int64_t at = step * 2 * kTileNumbers;
    return std::array{at, at};
  };
  for (int64_t row = 0; row < product.num_rows; row += kDotRows) {
    const uint16_t* a = product.a + row * kStepDepth;
    float* sums = product.sums + row * product.sum_stride;
    for (int64_t i = 0; i < num_vectors; i += 2, sums += kBlock) {
      const uint16_t* b = product.b + i / 2 * product.block;
      if (i + 1 < num_vectors) {
        DotKernel<2>::run(a, {b, b + kTileNumbers}, product.num_steps, place,
                          sums, product.sum_stride);
      } else {
        DotKernel<1>::run(a, {b}, product.num_steps, place, sums,
                          product.sum_stride);
      }
    }
  }
}

template <int64_t kNumVectors>
void multiply_rows_by_dots(const RowProduct& product) {
  multiply_rows_by_dots(product, kNumVectors);
}

inline RowFunction row_function_by_dots(int64_t num_vectors) {
  constexpr std::array<RowFunction, kMaxRowVectors> kFunctions{
      multiply_rows_by_dots<1>, multiply_rows_by_dots<2>,
      multiply_rows_by_dots<3>, multiply_rows_by_dots<4>};
  return kFunctions.at(static_cast<size_t>(num_vectors - 1));
}

}  // namespace popsim::dense
