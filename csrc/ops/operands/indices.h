// Integer positions: of 32 or 64 bits, with any strides.
#pragma once

#include <vector>

#include "ops/op_def.h"
#include "ops/operands/strided_walk.h"

namespace popsim::ops {

class IndexInput {
 public:
  IndexInput(const OpView& op, size_t input)
      : id_(op.input_id(input)),
        is_32_bit_(op.input(input).dtype == DType::kInt32),
        walk_(op.input(input).shape, op.input(input).strides),
        numbers_(static_cast<size_t>(op.input(input).numel())) {}

  // All positions in row-major order, valid until the next call.
  [[nodiscard]] const std::vector<int64_t>& read(const RunContext& context) {
    if (is_32_bit_) {
      read_as<int32_t>(context);
    } else {
      read_as<int64_t>(context);
    }
    return numbers_;
  }

 private:
  template <typename T>
  void read_as(const RunContext& context) {
    if (numbers_.empty()) return;
    const T* source = context.data<const T>(id_);
    auto out = numbers_.begin();
    walk_.for_each_run(0, static_cast<int64_t>(numbers_.size()),
                       [&](int64_t offset, int64_t stride, int64_t count) {
                         for (int64_t i = 0; i < count; ++i) {
                           *out++ = source[offset + i * stride];
                         }
                       });
  }

  graph::TensorId id_;
  bool is_32_bit_;
  StridedWalk walk_;
  std::vector<int64_t> numbers_;
};

}  // namespace popsim::ops
