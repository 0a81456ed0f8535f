#include "dense/vector/panels.h"

#include <array>
#include <utility>

#include "base/numbers.h"
#include "dense/vector/transpose.h"

namespace popsim::dense {
namespace {

using Vec = at::vec::Vectorized<float>;

constexpr int64_t kMaxRows = 6;
// The number of rows computed at a time: their sums fill most vector registers.
constexpr int64_t max_rows(int64_t vectors) {
  return kLanes >= 16 ? kMaxRows : std::min(kMaxRows, 12 / vectors);
}
// A panel is multiplied in pieces of this depth, which fit in L1.
constexpr int64_t kDepth = 128;

// out[row] (+)= a[row] * panel, for `depth` elements of a. kHalf: for one pass
// of half partials.
template <int kRows, int kVectors, bool kHalf>
void multiply_block(const float* panel, const float* a, int64_t lda,
                    int64_t depth, bool add, float* out) {
  constexpr int64_t kWidth = kVectors * kLanes;
  Vec sums[kRows][kVectors];
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      sums[row][v] = add && !kHalf ? Vec::loadu(out + row * kWidth + v * kLanes)
                                   : Vec(0.0f);
    }
  }
  for (int64_t k = 0; k < depth; ++k, panel += kWidth) {
    Vec weights[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      weights[v] = Vec::loadu(panel + v * kLanes);
    }
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      const Vec factor(a[row * lda + k]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        sums[row][v] = at::vec::fmadd(factor, weights[v], sums[row][v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      float* to = out + row * kWidth + v * kLanes;
      if constexpr (kHalf) {
        const Vec before = add ? Vec::loadu(to) : Vec(0.0f);
        rounded_to_half(before + sums[row][v]).store(to);
      } else {
        sums[row][v].store(to);
      }
    }
  }
}

using MultiplyBlock = decltype(&multiply_block<1, 1, false>);
// Indexed by the number of rows; null beyond the largest number.
struct BlocksByRows {
  int64_t max_rows;
  std::array<MultiplyBlock, kMaxRows> functions;
};

template <int kVectors, bool kHalf, int... kRows>
constexpr BlocksByRows blocks_of(
    std::integer_sequence<int, kRows...> /*rows*/) {
  return {sizeof...(kRows), {multiply_block<kRows + 1, kVectors, kHalf>...}};
}

template <int kVectors, bool kHalf>
constexpr BlocksByRows kBlocksOf = blocks_of<kVectors, kHalf>(
    std::make_integer_sequence<int, max_rows(kVectors)>());

// Indexed by the number of vectors.
template <bool kHalf>
constexpr std::array<BlocksByRows, kMaxPanelVectors> kBlocks{
    kBlocksOf<1, kHalf>, kBlocksOf<2, kHalf>, kBlocksOf<3, kHalf>,
    kBlocksOf<4, kHalf>};

// Processes any number of rows, in blocks of about the same size: a block of
// few rows waits for its weights.
void multiply_rows(const BlocksByRows& blocks, int64_t width,
                   const float* panel, const float* a, int64_t lda,
                   int64_t rows, int64_t depth, bool add, float* out) {
  const int64_t num_blocks = ceil_div(rows, blocks.max_rows);
  for (int64_t i = 0; i < num_blocks; ++i) {
    const int64_t begin = rows * i / num_blocks;
    const int64_t count = rows * (i + 1) / num_blocks - begin;
    blocks.functions[static_cast<size_t>(count - 1)](
        panel, a + begin * lda, lda, depth, add, out + begin * width);
  }
}

}  // namespace

void multiply_passes(const float* panel, int64_t vectors, const float* a,
                     int64_t lda, int64_t rows, int64_t depth, Passes passes,
                     bool add, float* out) {
  const auto& blocks = kBlocks<true>[static_cast<size_t>(vectors - 1)];
  const int64_t width = vectors * kLanes;
  const int64_t end_of_whole = passes.whole * kPassLength;
  for (int64_t k = 0; k < depth;) {
    const int64_t length = k < end_of_whole ? kPassLength : passes.rest;
    multiply_rows(blocks, width, panel + k * width, a + k, lda, rows, length,
                  add || k > 0, out);
    k += length;
  }
}

Panels::Panels(int64_t gates, int64_t hidden, int64_t depth,
               std::optional<Passes> passes)
    : gates_(gates), hidden_(hidden), depth_(depth), passes_(passes) {
  const int64_t pieces = ceil_div(hidden, kLanes);
  vectors_ = gates == 1 ? std::min(kMaxPanelVectors, pieces) : gates;
  count_ = gates == 1 ? ceil_div(pieces, vectors_) : pieces;
}

threads::Shares Panels::shares() const {
  // Each value is read and written.
  return {threads::elements(2 * count_ * panel_floats()), count_};
}

void Panels::pack_transposed(const float* weight, float* packed) const {
  shares().run([&](int64_t /*share*/, Range panels) {
    pack_transposed(weight, depth_, panels, packed);
  });
}

void Panels::pack(const float* weight, float* packed) const {
  shares().run([&](int64_t /*share*/, Range panels) {
    pack(weight, hidden_, panels, packed);
  });
}

void Panels::pack_transposed(const float* weight, int64_t stride, Range panels,
                             float* packed) const {
  for (int64_t i = panels.begin * vectors_; i < panels.end * vectors_; ++i) {
    const int64_t unit = unit_of(i / vectors_, i % vectors_);
    const int64_t count = std::clamp<int64_t>(hidden_ - unit, 0, kLanes);
    const float* from =
        weight + (gate_of(i % vectors_) * hidden_ + unit) * stride;
    float* to = packed + i / vectors_ * panel_floats() + i % vectors_ * kLanes;
    for (int64_t k = 0; k < depth_; k += kLanes) {
      transpose_padded<kLanes>(from + k, stride, to + k * width(), width(),
                               count, std::min(kLanes, depth_ - k));
    }
  }
}

void Panels::pack(const float* weight, int64_t stride, Range panels,
                  float* packed) const {
  for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
    const int64_t unit = unit_of(panel, 0);
    const int64_t count = std::min(width(), hidden_ - unit);
    const float* from = weight + unit;
    float* to = packed + panel * panel_floats();
    for (int64_t k = 0; k < depth_; ++k, from += stride, to += width()) {
      std::copy_n(from, count, to);
      std::fill(to + count, to + width(), 0.0f);
    }
  }
}

void Panels::multiply_panel(const float* panel, const float* a, int64_t lda,
                            int64_t rows, float* out) const {
  if (passes_) {
    multiply_passes(panel, vectors_, a, lda, rows, depth_, *passes_, false,
                    out);
    return;
  }
  const auto& blocks = kBlocks<false>[static_cast<size_t>(vectors_ - 1)];
  for (int64_t k = 0; k < depth_; k += kDepth) {
    multiply_rows(blocks, width(), panel + k * width(), a + k, lda, rows,
                  std::min(kDepth, depth_ - k), k > 0, out);
  }
}

}  // namespace popsim::dense
