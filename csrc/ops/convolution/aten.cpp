#include "ops/convolution/aten.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <optional>
#include <tuple>
#include <utility>

#include "ops/operands/all_bits.h"
#include "ops/operands/aten_types.h"
#include "ops/operands/float_operand.h"
#include "threads/tasks.h"

namespace popsim::ops {
namespace {

using Geometry = ConvolutionGeometry;

// Each task computes some of the images on one thread: with several threads
// PyTorch adds up in another order.
class AtenConvolution : public Kernel {
 public:
  AtenConvolution(const OpView& op, Geometry geometry)
      : g_(std::move(geometry)),
        inputs_(op.op().inputs),
        output_(op.output_id(0)),
        type_(to_scalar_type(op.output(0).dtype)),
        widen_(computes_in_float32(op.output(0).dtype)),
        tasks_(threads::multiplications(num_multiplications(g_)), g_.x[0]) {}

  std::vector<graph::TensorId> at_tensors() const override {
    std::vector<graph::TensorId> ids{output_};
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
  // A stand-in for an operand of which only the shape matters.
  [[nodiscard]] at::Tensor shape_only(const Shape& shape) const {
    return at::empty(shape, widen_ ? at::kFloat : type_);
  }
  [[nodiscard]] const at::Tensor& output(const RunContext& context) const {
    return context.tensor(output_);
  }
  static at::Tensor images_of(const at::Tensor& tensor, threads::Range images) {
    return tensor.narrow(0, images.begin, images.size());
  }
  // Calls body(task, images) for each task. PyTorch's own threads would look
  // for more work for milliseconds, on the cores of the other tasks.
  template <typename Body>
  void for_tasks(const Body& body) const {
    const AllBits all_bits;
    tasks_.run([&](int64_t task, threads::Range images) {
      const c10::InferenceMode no_autograd;
      const threads::ScopedBudget alone(1);
      body(task, images);
    });
  }
  // Stores the result of compute(images) of each task in the same images.
  template <typename Compute>
  void store_images(const RunContext& context, const Compute& compute) const {
    for_tasks([&](int64_t /*task*/, threads::Range images) {
      images_of(output(context), images).copy_(compute(images));
    });
  }
  [[nodiscard]] int64_t num_tasks() const { return tasks_.count(); }
  [[nodiscard]] std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(
      const at::Tensor& grad_y, const at::Tensor& x, const at::Tensor& weight,
      std::array<bool, 3> wanted) const {
    return at::convolution_backward(
        grad_y, x, weight, Shape{g_.y[1]}, g_.stride, g_.padding, g_.dilation,
        g_.transposed, g_.output_padding, g_.groups, wanted);
  }

  Geometry g_;

 private:
  static int64_t num_multiplications(const Geometry& g) {
    const Shape& positions = g.transposed ? g.x : g.y;
    return num_elements(positions) * num_elements(g.weight) /
           std::max<int64_t>(g.weight[0], 1);
  }

  std::vector<graph::TensorId> inputs_;
  graph::TensorId output_;
  at::ScalarType type_;
  bool widen_;
  threads::Tasks tasks_;
};

class AtenForward final : public AtenConvolution {
 public:
  using AtenConvolution::AtenConvolution;

  void run(const RunContext& context) override {
    const at::Tensor x = input(context, kX);
    const at::Tensor weight = input(context, kWeight);
    std::optional<at::Tensor> bias;
    if (has_input(kBias)) bias = input(context, kBias);
    store_images(context, [&](threads::Range images) {
      return at::convolution(images_of(x, images), weight, bias, g_.stride,
                             g_.padding, g_.dilation, g_.transposed,
                             g_.output_padding, g_.groups);
    });
  }
};

class AtenGradInput final : public AtenConvolution {
 public:
  using AtenConvolution::AtenConvolution;

  void run(const RunContext& context) override {
    const at::Tensor grad_y = input(context, kGradY);
    const at::Tensor weight = input(context, kWeight);
    const at::Tensor x = shape_only(g_.x);
    store_images(context, [&](threads::Range images) {
      return std::get<0>(backward(images_of(grad_y, images),
                                  images_of(x, images), weight,
                                  {true, false, false}));
    });
  }
};

class AtenGradWeight final : public AtenConvolution {
 public:
  using AtenConvolution::AtenConvolution;

  void run(const RunContext& context) override {
    const at::Tensor grad_y = input(context, kGradY);
    const at::Tensor x = input(context, kForwardX);
    const at::Tensor weight = shape_only(g_.weight);
    std::vector<at::Tensor> sums(static_cast<size_t>(num_tasks()));
    for_tasks([&](int64_t task, threads::Range images) {
      // On several threads, PyTorch's oneDNN writes outside its memory for
      // channels-last images (with a 1x1 kernel and a stride of 2).
      sums[static_cast<size_t>(task)] = std::get<1>(backward(
          images_of(grad_y, images).contiguous(),
          images_of(x, images).contiguous(), weight, {false, true, false}));
    });
    threads::run_alone([&] {
      for (size_t i = 1; i < sums.size(); ++i) sums[0].add_(sums[i]);
      output(context).copy_(sums[0]);
    });
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
