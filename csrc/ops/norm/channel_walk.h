// Tensors [batch, channels, spatial axes...] as matrices in which each column
// belongs to one channel, block by block.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/op_def.h"
#include "ops/operands/float_conversion.h"
#include "threads/tasks.h"

namespace popsim::ops {

// A contiguous matrix in the tensor's memory. Column i belongs to channel
// `channel` if the tensor has its channels before the positions, otherwise to
// channel i % channels.
struct ChannelBlock {
  int64_t offset;  // of the first element
  int64_t rows;
  int64_t width;
  int64_t channel;
};

class ChannelWalk {
 public:
  // A block has at most this size, so that it stays in L1, unless the tensor
  // has more channels.
  static constexpr int64_t kBlockElements = 4096;

  // `cost` is the cost of one element, in additions.
  ChannelWalk(const graph::Tensor& tensor, int64_t cost);

  [[nodiscard]] int64_t channels() const { return channels_; }
  // The number of elements of one channel.
  [[nodiscard]] int64_t count() const { return numel_ / channels_; }
  // Whether neighbours in memory belong to different channels.
  [[nodiscard]] bool interleaved() const { return interleaved_; }
  // The size of the widest block.
  [[nodiscard]] int64_t max_width() const;
  [[nodiscard]] int64_t max_elements() const;
  // The tasks that process the tensor. If the tensor is interleaved, a unit is
  // a row of the tensor seen as a matrix of max_width() columns, so every task
  // sees every channel. Otherwise a unit is a channel.
  [[nodiscard]] const threads::Tasks& tasks() const { return tasks_; }

  // Calls visit(block) for all blocks of some units.
  template <typename Visit>
  void for_each_block(threads::Range units, Visit&& visit) const;

 private:
  template <typename Visit>
  void visit_rows(int64_t begin, int64_t end, int64_t width,
                  Visit&& visit) const;

  int64_t numel_;
  int64_t channels_;
  int64_t positions_;
  bool interleaved_;
  int64_t rows_per_matrix_row_ = 1;
  threads::Tasks tasks_;
};

// Reads one or two tensors of a walk as float32 blocks: in place, or widened
// into scratch memory.
class BlockReader {
 public:
  BlockReader(graph::TensorId id, const graph::Tensor& tensor,
              const ChannelWalk& walk);

  [[nodiscard]] const float* read(const RunContext& context,
                                  const ChannelBlock& block, int64_t task);

 private:
  graph::TensorId id_;
  LoadFloats load_ = nullptr;                // for dtypes other than float32
  std::vector<std::vector<float>> scratch_;  // by task
};

template <typename Visit>
void ChannelWalk::visit_rows(int64_t begin, int64_t end, int64_t width,
                             Visit&& visit) const {
  const int64_t per_block = std::max<int64_t>(kBlockElements / width, 16);
  for (int64_t row = begin; row < end; row += per_block) {
    visit(ChannelBlock{row * width, std::min(per_block, end - row), width, 0});
  }
}

template <typename Visit>
void ChannelWalk::for_each_block(threads::Range units, Visit&& visit) const {
  if (interleaved_) {
    const int64_t width = max_width();
    const int64_t rows = numel_ / width;
    visit_rows(units.begin, units.end, width, visit);
    const int64_t rest = numel_ - rows * width;
    if (units.end == rows && rest > 0) {
      visit(ChannelBlock{rows * width, rest / channels_, channels_, 0});
    }
    return;
  }
  const int64_t batch = numel_ / (channels_ * positions_);
  for (int64_t c = units.begin; c < units.end; ++c) {
    for (int64_t n = 0; n < batch; ++n) {
      const int64_t plane = (n * channels_ + c) * positions_;
      for (int64_t i = 0; i < positions_; i += kBlockElements) {
        const int64_t size = std::min(kBlockElements, positions_ - i);
        const int64_t width = std::min(max_width(), size);
        const int64_t rows = size / width;
        visit(ChannelBlock{plane + i, rows, width, c});
        if (rows * width < size) {
          visit(ChannelBlock{plane + i + rows * width, 1, size - rows * width,
                             c});
        }
      }
    }
  }
}

}  // namespace popsim::ops
