// Copies a tensor; the layout and the dtype may change.
#include <ATen/core/Tensor.h>

#include <cstring>

#include "ops/layout/layout_copy.h"
#include "ops/op_def.h"
#include "ops/work.h"
#include "threads/tasks.h"

namespace popsim::ops {
namespace {

class BytesCopy final : public Kernel {
 public:
  BytesCopy(graph::TensorId from, graph::TensorId to, int64_t bytes)
      : from_(from), to_(to), shares_(threads::elements(bytes / 4), bytes) {}

  void run(const RunContext& context) override {
    shares_.run([&](int64_t /*share*/, threads::Range range) {
      std::memcpy(context.data<char>(to_) + range.begin,
                  context.data<char>(from_) + range.begin,
                  static_cast<size_t>(range.size()));
    });
  }

 private:
  graph::TensorId from_;
  graph::TensorId to_;
  threads::Shares shares_;
};

class StridedCopy final : public Kernel {
 public:
  explicit StridedCopy(const OpView& op)
      : from_(op.input_id(0)),
        to_(op.output_id(0)),
        copy_(op.input(0), op.output(0)) {}

  void run(const RunContext& context) override {
    copy_.run(context.data(from_), context.data(to_));
  }

 private:
  graph::TensorId from_;
  graph::TensorId to_;
  LayoutCopy copy_;
};

// Changes the dtype.
class ConvertingCopy final : public Kernel {
 public:
  ConvertingCopy(graph::TensorId from, graph::TensorId to)
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

std::vector<TensorType> copied_type(const OpCall& op) {
  TensorType type = op.input_type(0);
  if (op.has_attribute("dtype")) {
    type.dtype = dtype_from_name(op.attribute<std::string>("dtype"));
  }
  return {type};
}

std::unique_ptr<Kernel> prepare_copy(const OpView& op) {
  const graph::Tensor& from = op.input(0);
  const graph::Tensor& to = op.output(0);
  if (from.dtype != to.dtype) {
    return std::make_unique<ConvertingCopy>(op.input_id(0), op.output_id(0));
  }
  if ((from.contiguous() && to.contiguous()) || to.numel() == 0) {
    return std::make_unique<BytesCopy>(op.input_id(0), op.output_id(0),
                                       to.bytes());
  }
  return std::make_unique<StridedCopy>(op);
}

}  // namespace

extern const OpDef kCopy{
    .name = "copy",
    .schema = "copy(Tensor x, *, dtype? dtype) -> Tensor",
    .family = "layout",
    .shape = copied_type,
    .prepare = prepare_copy,
    .work = no_arithmetic,
    .outputs = OutputLayout::kAny,
    .cheap = true,
    .elementwise = true,
    .only_overflows = true,
};

}  // namespace popsim::ops
