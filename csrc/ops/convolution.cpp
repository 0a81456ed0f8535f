// Convolutions and their gradients, transposed ones included.
//
// Floating types up to 32 bits are computed in float32 by csrc/dense: 16-bit
// operands are widened on the way in and results are rounded once, on the way
// out. Everything else goes to ATen.
//
// A transposed convolution is the gradient of a convolution: its input takes
// the place of that convolution's output, and its output that of the input.
#include "dense/convolution.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <iterator>
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>

#include "ops/aten_types.h"
#include "ops/entries.h"
#include "ops/float_operand.h"

namespace popsim::ops {
namespace {

using dense::ConvolutionPass;
using dense::ConvolutionTensors;
using Ints = std::vector<int64_t>;

// Positions of inputs and outputs.
constexpr size_t kX = 0;  // convolution
constexpr size_t kWeight = 1;
constexpr size_t kBias = 2;
constexpr size_t kGradY = 0;     // both gradients
constexpr size_t kForwardX = 1;  // convolution_grad_weight
constexpr size_t kGradBias = 1;  // output of convolution_grad_weight

// --- Shapes
// -------------------------------------------------------------------

struct Geometry {
  Shape x;
  Shape weight;
  Shape y;
  Ints stride;
  Ints padding;
  Ints dilation;
  Ints output_padding;
  bool transposed;
  int64_t groups;
};

// One value per spatial axis; a single one holds for all of them.
Ints per_axis(const OpView& op, std::string_view name, size_t num_axes) {
  Ints values = op.attribute<Ints>(name);
  if (values.size() == 1) values.resize(num_axes, values.front());
  check_internal(values.size() == num_axes, op.op().kind, " '", op.op().name,
                 "': ", name, " has ", values.size(), " values for ", num_axes,
                 " spatial axes");
  return values;
}

Shape output_shape(const OpView& op, const Geometry& g) {
  const auto check = [&](bool condition, std::string_view rule) {
    check_internal(condition, op.op().kind, " '", op.op().name, "': ", rule,
                   ", got x ", to_string(g.x), " and weight ",
                   to_string(g.weight), " in ", g.groups, " groups");
  };
  const size_t rank = g.x.size();
  check(rank >= 3 && g.weight.size() == rank,
        "x and weight have two axes for channels and at least one more");
  check(g.groups > 0 && g.x[1] % g.groups == 0 && g.weight[0] % g.groups == 0,
        "the groups divide the channels");
  check(g.x[1] == (g.transposed ? g.weight[0] : g.weight[1] * g.groups),
        "x has the channels that the weight expects");
  Shape y{g.x[0], g.transposed ? g.weight[1] * g.groups : g.weight[0]};
  for (size_t i = 0; i + 2 < rank; ++i) {
    const int64_t kernel = g.dilation[i] * (g.weight[i + 2] - 1) + 1;
    const int64_t in = g.x[i + 2];
    const int64_t room = in + 2 * g.padding[i] - kernel;
    check(g.transposed || room >= 0, "the kernel fits into the padded input");
    y.push_back(g.transposed ? (in - 1) * g.stride[i] - 2 * g.padding[i] +
                                   kernel + g.output_padding[i]
                             : room / g.stride[i] + 1);
  }
  return y;
}

Geometry read_geometry(const OpView& op, const Shape& x, const Shape& weight) {
  const size_t num_axes = x.size() - std::min<size_t>(x.size(), 2);
  Geometry g{.x = x,
             .weight = weight,
             .y = {},
             .stride = per_axis(op, "stride", num_axes),
             .padding = per_axis(op, "padding", num_axes),
             .dilation = per_axis(op, "dilation", num_axes),
             .output_padding = per_axis(op, "output_padding", num_axes),
             .transposed = op.attribute<bool>("transposed"),
             .groups = op.attribute<int64_t>("groups")};
  g.y = output_shape(op, g);
  return g;
}

Geometry forward_geometry(const OpView& op) {
  return read_geometry(op, op.input(kX).shape, op.input(kWeight).shape);
}

Geometry grad_input_geometry(const OpView& op) {
  return read_geometry(op, op.attribute<Ints>("input_shape"),
                       op.input(kWeight).shape);
}

Geometry grad_weight_geometry(const OpView& op) {
  return read_geometry(op, op.input(kForwardX).shape,
                       op.attribute<Ints>("weight_shape"));
}

void check_grad_y(const OpView& op, const Geometry& g) {
  check_internal(op.input(kGradY).shape == g.y, op.op().kind, " '",
                 op.op().name, "': the gradient has shape ",
                 to_string(op.input(kGradY).shape),
                 ", the convolution's output has ", to_string(g.y));
}

void check_dtypes(const OpView& op, std::initializer_list<size_t> inputs) {
  for (const size_t i : inputs) {
    if (!op.has_input(i)) continue;
    check_internal(op.input(i).dtype == op.input(0).dtype, op.op().kind, " '",
                   op.op().name, "': operands have one element type, got ",
                   name_of(op.input(i).dtype), " beside ",
                   name_of(op.input(0).dtype));
  }
}

std::vector<TensorType> forward_type(const OpView& op) {
  check_dtypes(op, {kWeight, kBias});
  const Geometry g = forward_geometry(op);
  check_internal(!op.has_input(kBias) || op.input(kBias).shape == Shape{g.y[1]},
                 op.op().kind, " '", op.op().name, "': the bias has ", g.y[1],
                 " elements");
  return {{op.input(kX).dtype, g.y}};
}

std::vector<TensorType> grad_input_type(const OpView& op) {
  check_dtypes(op, {kWeight});
  const Geometry g = grad_input_geometry(op);
  check_grad_y(op, g);
  return {{op.input(kGradY).dtype, g.x}};
}

std::vector<TensorType> grad_weight_type(const OpView& op) {
  check_dtypes(op, {kForwardX});
  const Geometry g = grad_weight_geometry(op);
  check_grad_y(op, g);
  const DType dtype = op.input(kGradY).dtype;
  std::vector<TensorType> types{{dtype, g.weight}};
  if (op.attribute<bool>("bias")) types.push_back({dtype, {g.y[1]}});
  return types;
}

// --- Computed by csrc/dense
// -----------------------------------------------------

// The convolution that `g` is, or that it is a gradient of.
dense::ConvolutionSpec dense_spec(const Geometry& g) {
  const Shape& input = g.transposed ? g.y : g.x;
  const Shape& output = g.transposed ? g.x : g.y;
  return {.batch = input[0],
          .in_channels = input[1],
          .out_channels = output[1],
          .groups = g.groups,
          .input_size = {input.begin() + 2, input.end()},
          .kernel_size = {g.weight.begin() + 2, g.weight.end()},
          .output_size = {output.begin() + 2, output.end()},
          .stride = g.stride,
          .padding = g.padding,
          .dilation = g.dilation,
          .bias = false};
}

// A tensor [batch, count, positions].
struct Channels {
  int64_t batch;
  int64_t count;
  int64_t positions;
};

Channels channels_of(const Shape& shape) {
  return {shape[0], shape[1], num_elements(shape) / (shape[0] * shape[1])};
}

// Rows of a tensor that are worth a thread of their own.
int64_t grain(int64_t row_size) {
  return std::max<int64_t>(1, 32768 / row_size);
}

void add_per_channel(const float* bias, const Channels& c, float* y) {
  at::parallel_for(0, c.batch * c.count, grain(c.positions),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t row = begin; row < end; ++row) {
                       const float value = bias[row % c.count];
                       float* values = y + row * c.positions;
                       for (int64_t i = 0; i < c.positions; ++i) {
                         values[i] += value;
                       }
                     }
                   });
}

void sum_per_channel(const float* y, const Channels& c, float* sums) {
  at::parallel_for(0, c.count, grain(c.batch * c.positions),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t channel = begin; channel < end; ++channel) {
                       double sum = 0.0;
                       for (int64_t b = 0; b < c.batch; ++b) {
                         const float* values =
                             y + (b * c.count + channel) * c.positions;
                         sum += std::reduce(values, values + c.positions, 0.0);
                       }
                       sums[channel] = static_cast<float>(sum);
                     }
                   });
}

using Slot = float* ConvolutionTensors::*;

// Where the tensors of an op stand in the convolution of csrc/dense.
struct Roles {
  ConvolutionPass pass;
  std::vector<std::pair<size_t, Slot>> inputs;
  std::vector<std::pair<size_t, Slot>> outputs;
  bool bias;
};

Slot place_of_x(const Geometry& g) {
  return g.transposed ? &ConvolutionTensors::output
                      : &ConvolutionTensors::input;
}

Slot place_of_y(const Geometry& g) {
  return g.transposed ? &ConvolutionTensors::input
                      : &ConvolutionTensors::output;
}

Roles forward_roles(const OpView& op, const Geometry& g) {
  Roles roles{
      .pass = g.transposed ? ConvolutionPass::kGradInput
                           : ConvolutionPass::kForward,
      .inputs = {{kX, place_of_x(g)}, {kWeight, &ConvolutionTensors::weight}},
      .outputs = {{0, place_of_y(g)}},
      .bias = op.has_input(kBias)};
  if (roles.bias) roles.inputs.emplace_back(kBias, &ConvolutionTensors::bias);
  return roles;
}

Roles grad_input_roles(const OpView&, const Geometry& g) {
  return {.pass = g.transposed ? ConvolutionPass::kForward
                               : ConvolutionPass::kGradInput,
          .inputs = {{kGradY, place_of_y(g)},
                     {kWeight, &ConvolutionTensors::weight}},
          .outputs = {{0, place_of_x(g)}},
          .bias = false};
}

Roles grad_weight_roles(const OpView& op, const Geometry& g) {
  Roles roles{.pass = ConvolutionPass::kGradWeight,
              .inputs = {{kGradY, place_of_y(g)}, {kForwardX, place_of_x(g)}},
              .outputs = {{0, &ConvolutionTensors::weight}},
              .bias = op.attribute<bool>("bias")};
  if (roles.bias) {
    roles.outputs.emplace_back(kGradBias, &ConvolutionTensors::bias);
  }
  return roles;
}

class DenseConvolution final : public Kernel {
 public:
  // Null when csrc/dense does not have the convolution.
  static std::unique_ptr<DenseConvolution> create(const OpView& op,
                                                  const Geometry& g,
                                                  const Roles& roles) {
    dense::ConvolutionSpec spec = dense_spec(g);
    // oneDNN treats the bias together with the output, which is the input here
    // if the convolution is transposed.
    spec.bias = roles.bias && !g.transposed;
    auto convolution = dense::Convolution::create(spec, roles.pass);
    if (convolution == nullptr) return nullptr;
    auto kernel = std::unique_ptr<DenseConvolution>(
        new DenseConvolution(op, roles, std::move(convolution)));
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
    if (channels_ && pass_ == ConvolutionPass::kGradWeight) {
      sum_per_channel(tensors.input, *channels_, tensors.bias);
    } else if (channels_) {
      add_per_channel(tensors.bias, *channels_, tensors.input);
    }
    for (const auto& [output, slot] : outputs_) {
      output.store(context, workspace);
    }
  }

 private:
  DenseConvolution(const OpView& op, const Roles& roles,
                   std::unique_ptr<dense::Convolution> convolution)
      : pass_(roles.pass), convolution_(std::move(convolution)) {
    for (const auto& [index, slot] : roles.inputs) {
      inputs_.emplace_back(
          FloatInput(op.input_id(index), op.input(index), workspace_), slot);
    }
    for (const auto& [index, slot] : roles.outputs) {
      outputs_.emplace_back(
          FloatOutput(op.output_id(index), op.output(index), workspace_), slot);
    }
    offset_ = workspace_.add(convolution_->workspace_bytes());
  }

  ConvolutionPass pass_;
  std::unique_ptr<dense::Convolution> convolution_;
  Workspace workspace_;
  std::vector<std::pair<FloatInput, Slot>> inputs_;
  std::vector<std::pair<FloatOutput, Slot>> outputs_;
  size_t offset_ = 0;
  // Of y, where the bias is left to us.
  std::optional<Channels> channels_;
};

// --- Computed by ATen
// -----------------------------------------------------------

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
  AtenGradWeight(const OpView& op, const Geometry& geometry)
      : AtenConvolution(op, geometry), bias_(op.attribute<bool>("bias")) {}

  void run(const RunContext& context) override {
    const auto [grad_x, grad_weight, grad_bias] =
        backward(input(context, kGradY), input(context, kForwardX),
                 shape_only(g_.weight), {false, true, bias_});
    store(context, 0, grad_weight);
    if (bias_) store(context, kGradBias, grad_bias);
  }

 private:
  bool bias_;
};

template <typename Fallback, Geometry geometry_of(const OpView&),
          Roles roles_of(const OpView&, const Geometry&)>
std::unique_ptr<Kernel> prepare(const OpView& op) {
  const Geometry g = geometry_of(op);
  bool direct = computes_in_float32(op.output(0).dtype);
  for (size_t i = 0; i < op.num_outputs(); ++i) {
    direct = direct && op.output(i).contiguous();
  }
  if (direct) {
    if (auto kernel = DenseConvolution::create(op, g, roles_of(op, g))) {
      return kernel;
    }
  }
  return std::make_unique<Fallback>(op, g);
}

}  // namespace

const OpDef kConvolution{
    .name = "convolution",
    .schema =
        "convolution(Tensor x, Tensor weight, Tensor? bias=None, *, "
        "int[] stride, int[] padding, int[] dilation, int[] output_padding, "
        "bool transposed, int groups) -> Tensor",
    .shape = forward_type,
    .prepare = prepare<AtenForward, forward_geometry, forward_roles>,
};

const OpDef kConvolutionGradInput{
    .name = "convolution_grad_input",
    .schema =
        "convolution_grad_input(Tensor grad_y, Tensor weight, "
        "Tensor? x=None, *, int[] input_shape, int[] stride, int[] padding, "
        "int[] dilation, int[] output_padding, bool transposed, int groups) "
        "-> Tensor",
    .shape = grad_input_type,
    .prepare = prepare<AtenGradInput, grad_input_geometry, grad_input_roles>,
};

const OpDef kConvolutionGradWeight{
    .name = "convolution_grad_weight",
    .schema =
        "convolution_grad_weight(Tensor grad_y, Tensor x, *, "
        "int[] weight_shape, bool bias, int[] stride, int[] padding, "
        "int[] dilation, int[] output_padding, bool transposed, int groups) "
        "-> (Tensor, Tensor?)",
    .shape = grad_weight_type,
    .prepare = prepare<AtenGradWeight, grad_weight_geometry, grad_weight_roles>,
};

}  // namespace popsim::ops
