// One matrix product on one thread, cut into tiles.
//
// The products of a batch and those of attention
// (csrc/ops/attention/attention.h), which needs some tiles before others, are
// cut alike and so compute the same bits.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>

#include "dense/problem/matmul.h"

namespace popsim::dense {

// Fewest multiplications of a matrix of a batch that is cut: starting a product
// takes about as long as 50,000 of them.
inline constexpr int64_t kMinCutWork = 1 << 18;

// An axis in pieces of one length; the last one may be shorter.
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
  // Null when there is no fast code for the problem. `spec` is of one matrix:
  // its batch does not count. No bias, no alpha; beta is 0 or 1.
  [[nodiscard]] static std::unique_ptr<PieceMatmul> create(MatmulSpec spec);

  // How an axis of rows or depth is cut, for numbers of this precision.
  [[nodiscard]] static Cut cut(int64_t size, int significant_bits);

  [[nodiscard]] const Cut& rows() const { return rows_; }
  [[nodiscard]] const Cut& depth() const { return depth_; }
  [[nodiscard]] size_t workspace_bytes() const;

  // Piece `row` of the rows of a and c, which is all that they point to.
  void run_rows(int64_t row, const float* a, const float* b, float* c,
                void* workspace);
  // What piece `depth` of the columns of a and the rows of b, which is all that
  // they point to, adds to c. To be called in the order of the pieces.
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
  // By whether the tile has the last rows, the last and the first depth.
  std::array<std::unique_ptr<Matmul>, 8> tiles_;
};

// Whether products of a batch are cut into such tiles. Not for small matrices,
// and where one of the operands is the same for the whole batch.
[[nodiscard]] bool is_cut(const MatmulSpec& spec);

// Those products, on several threads. Null when there is no fast code.
[[nodiscard]] std::unique_ptr<Matmul> create_batch_matmul(
    const MatmulSpec& spec);

}  // namespace popsim::dense
