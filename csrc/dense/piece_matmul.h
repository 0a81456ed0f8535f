// One matrix product on one thread, divided into tiles.
//
// The products of a batch and those of attention
// (csrc/ops/attention/attention.h), which needs some tiles before others, are
// divided in the same way, so they compute the same bits.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>

#include "dense/problem/matmul.h"

namespace popsim::dense {

// A matrix of a batch is divided if it needs at least this number of
// multiplications: starting a product takes about as long as 50,000 of them.
inline constexpr int64_t kMinCutWork = 1 << 18;

// An axis divided into pieces of equal length; the last piece may be shorter.
class Cut {
 public:
  Cut(int64_t size, int64_t limit);

  [[nodiscard]] int64_t count() const { return count_; }
  [[nodiscard]] int64_t begin(int64_t i) const { return i * length_; }
  [[nodiscard]] int64_t length(int64_t i) const {
    return std::min(length_, size_ - begin(i));
  }
  [[nodiscard]] int64_t longest() const { return std::min(length_, size_); }

 private:
  int64_t size_;
  int64_t count_;
  int64_t length_;
};

class PieceMatmul {
 public:
  // Returns null if there is no fast code for the problem. `spec` describes one
  // matrix: its batch is ignored. It must have no bias and no alpha; beta must
  // be 0 or 1.
  [[nodiscard]] static std::unique_ptr<PieceMatmul> create(MatmulSpec spec);

  // How to divide an axis of rows or depth, for numbers with this number of
  // significant bits.
  [[nodiscard]] static Cut cut(int64_t size, int significant_bits);

  [[nodiscard]] const Cut& rows() const { return rows_; }
  [[nodiscard]] const Cut& depth() const { return depth_; }
  [[nodiscard]] size_t workspace_bytes() const;

  // Computes piece `row` of the rows; a and c must point to this piece.
  void run_rows(int64_t row, const float* a, const float* b, float* c,
                void* workspace);
  // Adds the product of piece `depth` to c; a must point to this piece of its
  // columns, b to this piece of its rows. Call it for the pieces in order.
  void run_depth(int64_t depth, const float* a, const float* b, float* c,
                 void* workspace);

 private:
  explicit PieceMatmul(const MatmulSpec& spec);
  [[nodiscard]] size_t index_of(int64_t row, int64_t depth) const;
  [[nodiscard]] bool plan_tile(int64_t row, int64_t depth);
  void run_tile(int64_t row, int64_t depth, const float* a, const float* b,
                float* c, void* workspace);

  MatmulSpec spec_;
  Cut rows_;
  Cut depth_;
  // Indexed by whether the tile has the last rows, the last depth and the first
  // depth.
  std::array<std::unique_ptr<Matmul>, 8> tiles_;
};

// Whether products of a batch are divided into such tiles. False for small
// matrices, and if one operand is the same for the whole batch.
[[nodiscard]] bool is_cut(const MatmulSpec& spec);

// Computes these products on several threads. Returns null if there is no fast
// code.
[[nodiscard]] std::unique_ptr<Matmul> create_batch_matmul(
    const MatmulSpec& spec);

}  // namespace popsim::dense
