#include "ops/norm/channel_walk.h"

#include <algorithm>

#include "ops/operands/image_layout.h"

namespace popsim::ops {
namespace {

// Number of columns that is worth a call: four of the widest vectors.
constexpr int64_t kWidth = 64;

}  // namespace

ChannelWalk::ChannelWalk(const graph::Tensor& tensor, int64_t cost)
    : numel_(tensor.numel()),
      channels_(tensor.shape.at(1)),
      positions_(numel_ / (tensor.shape[0] * channels_)),
      interleaved_(is_channels_last(tensor) || positions_ == 1) {
  check_internal(
      is_image(tensor) && numel_ > 0, "channels of '", tensor.name,
      "': the tensor is neither contiguous nor channels last, or is empty");
  if (interleaved_) {
    rows_per_matrix_row_ = std::clamp<int64_t>(kWidth / channels_, 1, count());
  }
  const int64_t units = interleaved_ ? numel_ / max_width() : channels_;
  tasks_ = threads::Tasks(threads::additions(numel_ * cost), units);
}

int64_t ChannelWalk::max_width() const {
  return interleaved_ ? rows_per_matrix_row_ * channels_ : kWidth;
}

int64_t ChannelWalk::max_elements() const {
  return std::max(kBlockElements, 16 * max_width());
}

BlockReader::BlockReader(graph::TensorId id, const graph::Tensor& tensor,
                         const ChannelWalk& walk)
    : id_(id) {
  if (tensor.dtype == DType::kFloat32) return;
  load_ = load_floats(tensor.dtype);
  scratch_.resize(static_cast<size_t>(walk.tasks().count()));
  for (auto& memory : scratch_) {
    memory.resize(static_cast<size_t>(walk.max_elements()));
  }
}

const float* BlockReader::read(const RunContext& context,
                               const ChannelBlock& block, int64_t task) {
  if (load_ == nullptr) return context.data<float>(id_) + block.offset;
  float* out = scratch_[static_cast<size_t>(task)].data();
  load_(context.data(id_), block.offset, 1, block.rows * block.width, out);
  return out;
}

}  // namespace popsim::ops
