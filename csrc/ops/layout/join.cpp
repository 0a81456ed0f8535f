// Writes tensors into parts of a larger one: next to each other, or into zeros.
#include <cstring>
#include <utility>

#include "ops/layout/layout_copy.h"
#include "ops/op_def.h"
#include "ops/work.h"

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
  int64_t offset;  // in bytes, of its first element in the whole tensor
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
    kernel->add(op.input_id(i), input,
                part_of(whole, input.shape, whole.strides), offset);
    offset += input.shape[axis] * whole.strides[axis];
  }
  return kernel;
}

std::vector<TensorType> cat_type(const OpCall& op) {
  TensorType whole = op.input_type(0);
  const auto axis = static_cast<size_t>(op.attribute<int64_t>("axis"));
  op.require(axis < whole.shape.size(), "the inputs have an axis ", axis);
  op.require_one_dtype();
  whole.shape[axis] = 0;
  for (size_t i = 0; i < op.num_inputs(); ++i) {
    Shape part = op.input(i).shape;
    op.require_rank(i, whole.shape.size());
    const int64_t size = std::exchange(part[axis], whole.shape[axis]);
    op.require(part == whole.shape && op.input(i).numel() > 0, "input ", i,
               " differs only in the size of axis ", axis, " and is not empty");
    whole.shape[axis] += size;
  }
  return {whole};
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

std::vector<TensorType> into_zeros_type(const OpCall& op) {
  const auto& whole = op.attribute<std::vector<int64_t>>("shape");
  const auto& strides = op.attribute<std::vector<int64_t>>("strides");
  const Shape& part = op.input(0).shape;
  op.require(is_valid_shape(whole) && strides.size() == part.size() &&
                 lies_within(part, strides, op.attribute<int64_t>("offset"),
                             num_elements(whole)),
             "the part lies inside a tensor of shape ", to_string(whole));
  return {{op.input(0).dtype, whole}};
}

}  // namespace

extern const OpDef kCat{
    .name = "cat",
    .schema = "cat(Tensor[] tensors, *, int{0..} axis) -> Tensor",
    .family = "layout",
    .shape = cat_type,
    .prepare = prepare_cat,
    .work = no_arithmetic,
    .cheap = true,
    .exact = true,
};

extern const OpDef kIntoZeros{
    .name = "into_zeros",
    .schema =
        "into_zeros(Tensor x, *, int{0..}[] shape, int{0..}[] strides, "
        "int{0..} offset) -> Tensor",
    .family = "layout",
    .shape = into_zeros_type,
    .prepare = prepare_into_zeros,
    .work = no_arithmetic,
    .exact = true,
};

}  // namespace popsim::ops
