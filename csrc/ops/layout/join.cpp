// Tensors put into parts of a larger one: side by side, or into zeros.
#include <cstring>

#include "ops/layout/layout_copy.h"
#include "ops/op_def.h"

namespace popsim::ops {
namespace {

// A part of a contiguous tensor.
graph::Tensor part_of(const graph::Tensor& whole, Shape shape,
                      Strides strides) {
  graph::Tensor part = whole;
  part.shape = std::move(shape);
  part.strides = std::move(strides);
  return part;
}

struct Part {
  graph::TensorId from;
  int64_t offset;  // in bytes, of its first element in the whole
  LayoutCopy copy;
};

class Parts final : public Kernel {
 public:
  Parts(const graph::Tensor& whole, graph::TensorId to, bool clears)
      : to_(to), cleared_bytes_(clears ? whole.bytes() : 0) {}

  void add(graph::TensorId from, const graph::Tensor& tensor,
           const graph::Tensor& part, int64_t offset) {
    parts_.push_back(
        {from, offset * size_in_bytes(part.dtype), LayoutCopy(tensor, part)});
  }

  void run(const RunContext& context) override {
    auto* to = context.data<char>(to_);
    std::memset(to, 0, static_cast<size_t>(cleared_bytes_));
    for (const Part& part : parts_) {
      part.copy.run(context.data(part.from), to + part.offset);
    }
  }

 private:
  graph::TensorId to_;
  int64_t cleared_bytes_;
  std::vector<Part> parts_;
};

std::unique_ptr<Kernel> prepare_cat(const OpView& op) {
  const graph::Tensor& whole = op.output(0);
  const auto axis = static_cast<size_t>(op.attribute<int64_t>("axis"));
  auto kernel =
      std::make_unique<Parts>(whole, op.output_id(0), /*clears=*/false);
  int64_t offset = 0;
  for (size_t i = 0; i < op.num_inputs(); ++i) {
    const graph::Tensor& input = op.input(i);
    check_internal(input.dtype == whole.dtype && input.numel() > 0, "cat '",
                   op.op().name, "': input ", i,
                   " is of another type or empty");
    kernel->add(op.input_id(i), input,
                part_of(whole, input.shape, whole.strides), offset);
    offset += input.shape[axis] * whole.strides[axis];
  }
  return kernel;
}

std::vector<TensorType> cat_type(const OpView& op) {
  Shape shape = op.input(0).shape;
  const auto axis = static_cast<size_t>(op.attribute<int64_t>("axis"));
  for (size_t i = 1; i < op.num_inputs(); ++i) {
    shape.at(axis) += op.input(i).shape.at(axis);
  }
  return {{op.input(0).dtype, shape}};
}

std::unique_ptr<Kernel> prepare_into_zeros(const OpView& op) {
  const graph::Tensor& whole = op.output(0);
  auto kernel =
      std::make_unique<Parts>(whole, op.output_id(0), /*clears=*/true);
  kernel->add(op.input_id(0), op.input(0),
              part_of(whole, op.input(0).shape,
                      op.attribute<std::vector<int64_t>>("strides")),
              op.attribute<int64_t>("offset"));
  return kernel;
}

std::vector<TensorType> into_zeros_type(const OpView& op) {
  return {{op.input(0).dtype, op.attribute<std::vector<int64_t>>("shape")}};
}

}  // namespace

extern const OpDef kCat{
    .name = "cat",
    .schema = "cat(Tensor[] tensors, *, int axis) -> Tensor",
    .shape = cat_type,
    .prepare = prepare_cat,
};

extern const OpDef kIntoZeros{
    .name = "into_zeros",
    .schema =
        "into_zeros(Tensor x, *, int[] shape, int[] strides, int offset) "
        "-> Tensor",
    .shape = into_zeros_type,
    .prepare = prepare_into_zeros,
};

}  // namespace popsim::ops
