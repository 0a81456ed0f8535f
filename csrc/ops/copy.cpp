// Copies a tensor, also between layouts and element types.
#include <ATen/core/Tensor.h>

#include <cstring>

#include "ops/entries.h"

namespace popsim::ops {
namespace {

class BytesCopy final : public Kernel {
 public:
  BytesCopy(graph::TensorId from, graph::TensorId to, int64_t bytes)
      : from_(from), to_(to), bytes_(static_cast<size_t>(bytes)) {}

  void run(const RunContext& context) override {
    std::memcpy(context.data(to_), context.data(from_), bytes_);
  }

 private:
  graph::TensorId from_;
  graph::TensorId to_;
  size_t bytes_;
};

class StridedCopy final : public Kernel {
 public:
  StridedCopy(graph::TensorId from, graph::TensorId to)
      : from_(from), to_(to) {}

  std::vector<graph::TensorId> at_tensors() const override {
    return {from_, to_};
  }

  void run(const RunContext& context) override {
    context.tensor(to_).copy_(context.tensor(from_));
  }

 private:
  graph::TensorId from_;
  graph::TensorId to_;
};

std::vector<TensorType> copied_type(const OpView& op) {
  return {{op.output(0).dtype, op.input(0).shape}};
}

}  // namespace

const OpDef kCopy{
    .name = "copy",
    .schema = "copy(Tensor x) -> Tensor",
    .shape = copied_type,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      const graph::Tensor& from = op.input(0);
      const graph::Tensor& to = op.output(0);
      if (from.dtype == to.dtype && from.contiguous() && to.contiguous()) {
        return std::make_unique<BytesCopy>(op.input_id(0), op.output_id(0),
                                           to.bytes());
      }
      return std::make_unique<StridedCopy>(op.input_id(0), op.output_id(0));
    },
};

}  // namespace popsim::ops
