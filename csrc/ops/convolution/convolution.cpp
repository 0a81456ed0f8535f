// Convolutions and their gradients, including transposed ones.
//
// csrc/dense computes floating-point types up to 32 bits in float32: 16-bit
// operands are widened when they are read, and results are rounded once, when
// they are written; or float16 operands are added up in float16 (half.h). ATen
// computes all other types.
#include "dense/convolution.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "ops/convolution/aten.h"
#include "ops/convolution/depthwise.h"
#include "ops/convolution/depthwise_volume.h"
#include "ops/convolution/half.h"
#include "ops/convolution/products.h"
#include "ops/convolution/roles.h"
#include "ops/op_def.h"
#include "ops/operands/float_operand.h"
#include "ops/operands/image_layout.h"
#include "ops/operands/partials.h"
#include "ops/operands/precision.h"
#include "ops/work.h"
#include "threads/tasks.h"

namespace popsim::ops {
namespace {

using dense::ConvolutionPass;
using dense::ConvolutionTensors;
using dense::Order;
using Geometry = ConvolutionGeometry;
using Roles = ConvolutionRoles;
using Slot = ConvolutionSlot;

// A tensor [batch, count, positions].
struct Channels {
  int64_t batch;
  int64_t count;
  int64_t positions;
};

Channels channels_of(const Shape& shape) {
  return {shape[0], shape[1], num_elements(shape) / (shape[0] * shape[1])};
}

void add_per_channel(const float* bias, const Channels& c, float* y) {
  const int64_t num_rows = c.batch * c.count;
  const threads::Shares shares(threads::elements(num_rows * c.positions),
                               num_rows);
  shares.run([&](int64_t /*share*/, threads::Range rows) {
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      const float value = bias[row % c.count];
      float* values = y + row * c.positions;
      for (int64_t i = 0; i < c.positions; ++i) values[i] += value;
    }
  });
}

Order order_of(const graph::Tensor& tensor) {
  return is_channels_last(tensor) ? Order::kChannelsLast
                                  : Order::kChannelsFirst;
}

void set_order(dense::ConvolutionSpec& spec, Slot slot, Order order) {
  if (slot == &ConvolutionTensors::input) spec.input_order = order;
  if (slot == &ConvolutionTensors::output) spec.output_order = order;
}

std::unique_ptr<dense::Convolution> choose(const dense::ConvolutionSpec& spec,
                                           ConvolutionPass pass) {
  if (auto volume = create_depthwise_volume(spec, pass)) return volume;
  if (auto products = create_product_convolution(spec, pass)) return products;
  if (auto channels = create_depthwise_grad_weight(spec, pass)) return channels;
  return dense::create_convolution(spec, pass);
}

class DenseConvolution final : public Kernel {
 public:
  // Null if only ATen can compute the convolution.
  static std::unique_ptr<DenseConvolution> create(const OpView& op,
                                                  const Geometry& g,
                                                  const Roles& roles) {
    dense::ConvolutionSpec spec = dense_spec(g);
    // oneDNN adds the bias to its output, which is the input here if the
    // convolution is transposed.
    spec.bias = roles.bias && !g.transposed;
    spec.significant_bits = 0;
    for (const auto& [index, slot] : roles.inputs) {
      spec.significant_bits =
          std::max(spec.significant_bits,
                   significant_bits_in(op, op.input(index).dtype));
    }
    if (!g.transposed) {
      for (const auto& [index, slot] : roles.inputs) {
        // Reordering an operand takes less time than its products.
        const bool last =
            is_depthwise_volume(spec) || moves_channels_last(spec, roles.pass);
        set_order(spec, slot,
                  last ? Order::kChannelsLast : order_of(op.input(index)));
      }
      for (const auto& [index, slot] : roles.outputs) {
        set_order(spec, slot, order_of(op.output(index)));
      }
    }
    auto convolution = choose(spec, roles.pass);
    if (convolution == nullptr) return nullptr;
    auto kernel = std::unique_ptr<DenseConvolution>(
        new DenseConvolution(op, roles, spec, std::move(convolution)));
    if (roles.bias && g.transposed) kernel->channels_ = channels_of(g.y);
    return kernel;
  }

  void run(const RunContext& context) override {
    char* workspace = workspace_.memory();
    ConvolutionTensors tensors;
    for (const auto& [input, slot] : inputs_) {
      tensors.*slot = input.load(context, workspace);
    }
    for (const auto& [output, slot] : outputs_) {
      tensors.*slot = output.buffer(context, workspace);
    }
    convolution_->run(tensors, workspace + offset_);
    if (channels_) add_per_channel(tensors.bias, *channels_, tensors.input);
    for (const auto& [output, slot] : outputs_) {
      output.store(context, workspace);
    }
  }

 private:
  DenseConvolution(const OpView& op, const Roles& roles,
                   const dense::ConvolutionSpec& spec,
                   std::unique_ptr<dense::Convolution> convolution)
      : convolution_(std::move(convolution)) {
    for (const auto& [index, slot] : roles.inputs) {
      const graph::Tensor& input = op.input(index);
      Order order = Order::kChannelsFirst;
      if (slot == &ConvolutionTensors::input) order = spec.input_order;
      if (slot == &ConvolutionTensors::output) order = spec.output_order;
      const FloatView view{op.input_id(index), input.dtype, input.shape,
                           input.strides};
      inputs_.emplace_back(FloatInput(view, axes_in(order, input.shape.size()),
                                      false, workspace_),
                           slot);
    }
    for (const auto& [index, slot] : roles.outputs) {
      outputs_.emplace_back(
          FloatOutput(op.output_id(index), op.output(index), workspace_), slot);
    }
    offset_ = workspace_.add(convolution_->workspace_bytes());
  }

  std::unique_ptr<dense::Convolution> convolution_;
  Workspace workspace_;
  std::vector<std::pair<FloatInput, Slot>> inputs_;
  std::vector<std::pair<FloatOutput, Slot>> outputs_;
  size_t offset_ = 0;
  // The channels of y, if this class must add the bias itself.
  std::optional<Channels> channels_;
};

using Fallback = std::unique_ptr<Kernel> (*)(const OpView&, const Geometry&);

template <Geometry geometry_of(const OpCall&),
          Roles roles_of(const OpView&, const Geometry&), Fallback fallback>
std::unique_ptr<Kernel> prepare(const OpView& op) {
  const Geometry g = geometry_of(op);
  const Roles roles = roles_of(op, g);
  if (has_half_partials(op)) {
    if (auto kernel = create_half_convolution(op, g, roles)) return kernel;
    return fallback(op, g);  // without elements: there are no sums
  }
  const bool any_order =
      !g.transposed && roles.pass != ConvolutionPass::kGradWeight;
  bool direct = computes_in_float32(op.output(0).dtype);
  for (size_t i = 0; i < op.num_outputs(); ++i) {
    const graph::Tensor& output = op.output(i);
    direct = direct && (any_order ? is_image(output) : output.contiguous());
  }
  if (direct) {
    if (auto kernel = DenseConvolution::create(op, g, roles)) return kernel;
  }
  return fallback(op, g);
}

}  // namespace

extern const OpDef kConvolution{
    .name = "convolution",
    .schema =
        "convolution(Tensor x, Tensor weight, Tensor? bias, *, "
        "int{1..}[] stride, int{0..}[] padding, int{1..}[] dilation, "
        "int{0..}[] output_padding, bool transposed, int{1..} groups, "
        "str{half}? partials, str{bf16, tf32}? precision) -> Tensor",
    .family = "convolution",
    .shape = forward_type,
    .prepare = prepare<forward_geometry, forward_roles, aten_forward>,
    .work = forward_work,
    .outputs = OutputLayout::kAny,
    .layer = true,
    .only_overflows = true,
};

extern const OpDef kConvolutionGradInput{
    .name = "convolution_grad_input",
    .schema =
        "convolution_grad_input(Tensor grad_y, Tensor weight, *, "
        "int{1..}[] input_shape, int{1..}[] stride, int{0..}[] padding, "
        "int{1..}[] dilation, "
        "int{0..}[] output_padding, bool transposed, int{1..} groups, "
        "str{half}? partials, str{bf16, tf32}? precision) -> Tensor",
    .family = "convolution",
    .shape = grad_input_type,
    .prepare = prepare<grad_input_geometry, grad_input_roles, aten_grad_input>,
    .work = grad_input_work,
    .outputs = OutputLayout::kAny,
    .layer = true,
    .only_overflows = true,
};

extern const OpDef kConvolutionGradWeight{
    .name = "convolution_grad_weight",
    .schema =
        "convolution_grad_weight(Tensor grad_y, Tensor x, *, "
        "int{1..}[] weight_shape, int{1..}[] stride, int{0..}[] padding, "
        "int{1..}[] dilation, "
        "int{0..}[] output_padding, bool transposed, int{1..} groups, "
        "str{half}? partials, str{bf16, tf32}? precision) -> Tensor",
    .family = "convolution",
    .shape = grad_weight_type,
    .prepare =
        prepare<grad_weight_geometry, grad_weight_roles, aten_grad_weight>,
    .work = grad_weight_work,
    .outputs = OutputLayout::kAny,
    .layer = true,
    .only_overflows = true,
};

}  // namespace popsim::ops
