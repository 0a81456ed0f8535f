// Writes the blocks of a product's output, of any dtype, from float32 sums.
#pragma once

#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <array>
#include <cstdint>

#include "dense/problem/product_row.h"
#include "dense/tile/units.h"

namespace popsim::dense {

// The sums of a block over a section of the depth.
struct SumBlock {
  float* sums = nullptr;  // [kBlock][kBlock]; to be multiplied by the scale
  float scale = 1.0F;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t offset = 0;  // of the first element in c
  int64_t column = 0;  // of the first element
  // The sums of the sections so far, read unless this is the first one, and
  // written unless it is the last one.
  float* kept = nullptr;
  int64_t kept_stride = 0;  // between rows
  bool first = true;
  bool last = true;
};

class BlockWriter {
 public:
  // `spec` must outlive it.
  explicit BlockWriter(const MatmulSpec& spec) : spec_(spec), row_(spec) {}

  // Whether the sums are the result.
  [[nodiscard]] bool plain() const {
    return row_.plain() && spec_.result_type == DType::kFloat32;
  }

  // Writes a row of a block. Scales the sums in place.
  void write_row(const MatmulOperands& operands, const SumBlock& block,
                 int64_t row) const {
    if (is_direct(block)) {
      scale_to_end(operands, block, row);
      return;
    }
    scale_in_place(block, row);
    if (!block.first) add_kept(block, row);
    end_row(operands, block, row);
  }

  // Writes all rows. Each loop takes all of them, so that the processor waits
  // for the memory of many rows at the same time.
  void write(const MatmulOperands& operands, const SumBlock& block) const {
    const bool direct = is_direct(block);
    for (int64_t row = 0; row < block.rows; ++row) {
      if (direct) {
        scale_to_end(operands, block, row);
      } else {
        scale_in_place(block, row);
      }
    }
    if (direct) return;
    for (int64_t row = 0; row < block.rows && !block.first; ++row) {
      add_kept(block, row);
    }
    for (int64_t row = 0; row < block.rows; ++row) {
      end_row(operands, block, row);
    }
  }

 private:
  using Vec = at::vec::Vectorized<float>;

  // Whether scaled sums are all that is written.
  [[nodiscard]] bool is_direct(const SumBlock& block) const {
    return block.columns == kBlock && block.first && (!block.last || plain());
  }

  void scale_to_end(const MatmulOperands& operands, const SumBlock& block,
                    int64_t row) const {
    scale(block.sums + row * kBlock, block.scale,
          block.last ? operands.c_floats() + block.offset + row * spec_.n
                     : block.kept + row * block.kept_stride);
  }

  static void scale_in_place(const SumBlock& block, int64_t row) {
    float* sums = block.sums + row * kBlock;
    scale(sums, block.scale, sums);
  }

  static void scale(const float* from, float factor, float* to) {
    for (int64_t j = 0; j < kBlock; j += Vec::size()) {
      (Vec(factor) * Vec::loadu(from + j)).store(to + j);
    }
  }

  static void add_kept(const SumBlock& block, int64_t row) {
    const float* kept = block.kept + row * block.kept_stride;
    float* sums = block.sums + row * kBlock;
    for (int64_t j = 0; j < block.columns; j += Vec::size()) {
      const auto size =
          static_cast<int>(std::min<int64_t>(Vec::size(), block.columns - j));
      (Vec::loadu(sums + j) + Vec::loadu(kept + j, size)).store(sums + j);
    }
  }

  void end_row(const MatmulOperands& operands, const SumBlock& block,
               int64_t row) const {
    const float* sums = block.sums + row * kBlock;
    if (block.last) {
      finish(operands, sums, block.columns, block.offset + row * spec_.n,
             block.column);
    } else {
      std::copy_n(sums, block.columns, block.kept + row * block.kept_stride);
    }
  }

  // Writes a row; `offset` and `column` are those of its first element.
  void finish(const MatmulOperands& operands, const float* sums,
              int64_t columns, int64_t offset, int64_t column) const {
    if (spec_.result_type == DType::kFloat32) {
      row_.finish(operands, sums, columns, offset, column,
                  operands.c_floats() + offset);
      return;
    }
    alignas(64) std::array<float, static_cast<size_t>(kBlock)> wide;
    row_.finish(operands, sums, columns, offset, column, wide.data());
    if (spec_.result_type == DType::kFloat16) {
      narrow<at::Half>(wide.data(), operands.c, offset, columns);
    } else {
      narrow<at::BFloat16>(wide.data(), operands.c, offset, columns);
    }
  }

  template <typename Narrow>
  static void narrow(const float* from, void* c, int64_t at, int64_t count) {
    at::vec::convert(from, static_cast<Narrow*>(c) + at, count);
  }

  const MatmulSpec& spec_;
  ProductRow row_;
};

// Collects blocks that are adjacent along the rows of the output and writes
// them together, row by row. The rows of one block are too short: the processor
// does not fetch ahead the memory that the end of a block reads and writes. And
// it cannot read sums that the units have just stored before they are in the
// cache, after all that was stored earlier.
class StripWriter {
 public:
  static constexpr int64_t kMostBlocks = 32;

  // `sums`: memory for the sums of `most` blocks.
  StripWriter(const BlockWriter& writer, const MatmulOperands& operands,
              float* sums, int64_t most)
      : writer_(writer), operands_(operands), sums_(sums), most_(most) {}

  // Memory for the sums of the next block.
  [[nodiscard]] float* sums() const { return sums_ + count_ * kBlockNumbers; }

  void add(const SumBlock& block) {
    blocks_[static_cast<size_t>(count_++)] = block;
    if (count_ == most_) write();
  }

  void write() {
    if (count_ == 1) {
      writer_.write(operands_, blocks_[0]);
    } else {
      write_rows();
    }
    count_ = 0;
  }

 private:
  void write_rows() const {
    for (int64_t row = 0; row < blocks_[0].rows; ++row) {
      for (int64_t i = 0; i < count_; ++i) {
        writer_.write_row(operands_, blocks_[static_cast<size_t>(i)], row);
      }
    }
  }

  const BlockWriter& writer_;
  const MatmulOperands& operands_;
  float* sums_;
  int64_t most_;
  std::array<SumBlock, static_cast<size_t>(kMostBlocks)> blocks_;
  int64_t count_ = 0;
};

}  // namespace popsim::dense
