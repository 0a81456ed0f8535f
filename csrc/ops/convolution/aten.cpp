#include "ops/convolution/aten.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <optional>
#include <tuple>
#include <utility>

#include "ops/operands/aten_types.h"
#include "ops/operands/float_operand.h"

namespace popsim::ops {
namespace {

using Geometry = ConvolutionGeometry;

class AtenConvolution : public Kernel {
 public:
  AtenConvolution(const OpView& op, Geometry geometry)
      : g_(std::move(geometry)),
        inputs_(op.op().inputs),
        outputs_(op.op().outputs),
        type_(to_scalar_type(op.output(0).dtype)),
        widen_(computes_in_float32(op.output(0).dtype)) {}

  std::vector<graph::TensorId> at_tensors() const override {
    std::vector<graph::TensorId> ids = outputs_;
    std::ranges::copy_if(
        inputs_, std::back_inserter(ids),
        [](graph::TensorId id) { return id != graph::kNoTensor; });
    return ids;
  }

 protected:
  [[nodiscard]] at::Tensor input(const RunContext& context, size_t i) const {
    const at::Tensor& tensor = context.tensor(inputs_.at(i));
    return widen_ ? tensor.to(at::kFloat) : tensor;
  }
  [[nodiscard]] bool has_input(size_t i) const {
    return i < inputs_.size() && inputs_[i] != graph::kNoTensor;
  }
  // For an operand of which only the shape matters.
  [[nodiscard]] at::Tensor shape_only(const Shape& shape) const {
    return at::empty(shape, widen_ ? at::kFloat : type_);
  }
  void store(const RunContext& context, size_t i,
             const at::Tensor& value) const {
    context.tensor(outputs_.at(i)).copy_(value);
  }
  [[nodiscard]] std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(
      const at::Tensor& grad_y, const at::Tensor& x, const at::Tensor& weight,
      std::array<bool, 3> wanted) const {
    return at::convolution_backward(
        grad_y, x, weight, Shape{g_.y[1]}, g_.stride, g_.padding, g_.dilation,
        g_.transposed, g_.output_padding, g_.groups, wanted);
  }

  Geometry g_;

 private:
  std::vector<graph::TensorId> inputs_;
  std::vector<graph::TensorId> outputs_;
  at::ScalarType type_;
  bool widen_;
};

class AtenForward final : public AtenConvolution {
 public:
  using AtenConvolution::AtenConvolution;

  void run(const RunContext& context) override {
    std::optional<at::Tensor> bias;
    if (has_input(kBias)) bias = input(context, kBias);
    store(context, 0,
          at::convolution(input(context, kX), input(context, kWeight), bias,
                          g_.stride, g_.padding, g_.dilation, g_.transposed,
                          g_.output_padding, g_.groups));
  }
};

class AtenGradInput final : public AtenConvolution {
 public:
  using AtenConvolution::AtenConvolution;

  void run(const RunContext& context) override {
    const auto [grad_x, grad_weight, grad_bias] =
        backward(input(context, kGradY), shape_only(g_.x),
                 input(context, kWeight), {true, false, false});
    store(context, 0, grad_x);
  }
};

class AtenGradWeight final : public AtenConvolution {
 public:
  using AtenConvolution::AtenConvolution;

  void run(const RunContext& context) override {
    // On several threads PyTorch's oneDNN writes outside of its memory for
    // images whose channels lie last (a 1x1 kernel with a stride of 2).
    const auto [grad_x, grad_weight, grad_bias] =
        backward(input(context, kGradY).contiguous(),
                 input(context, kForwardX).contiguous(), shape_only(g_.weight),
                 {false, true, false});
    store(context, 0, grad_weight);
  }
};

}  // namespace

std::unique_ptr<Kernel> aten_forward(const OpView& op,
                                     const Geometry& geometry) {
  return std::make_unique<AtenForward>(op, geometry);
}

std::unique_ptr<Kernel> aten_grad_input(const OpView& op,
                                        const Geometry& geometry) {
  return std::make_unique<AtenGradInput>(op, geometry);
}

std::unique_ptr<Kernel> aten_grad_weight(const OpView& op,
                                         const Geometry& geometry) {
  return std::make_unique<AtenGradWeight>(op, geometry);
}

}  // namespace popsim::ops
