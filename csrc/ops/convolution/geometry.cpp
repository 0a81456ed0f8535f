#include "ops/convolution/geometry.h"

#include <algorithm>
#include <string_view>

#include "ops/operands/partials.h"
#include "ops/operands/precision.h"

namespace popsim::ops {
namespace {

using Geometry = ConvolutionGeometry;
using Ints = std::vector<int64_t>;

// A limit that keeps sizes computed from it from overflowing.
constexpr int64_t kMost = int64_t{1} << 30;

// Returns one value per spatial axis; a single value counts for all axes.
Ints per_axis(const OpCall& op, std::string_view name, size_t num_axes) {
  Ints values = op.attribute<Ints>(name);
  if (values.size() == 1) values.resize(num_axes, values.front());
  op.require(values.size() == num_axes, name, " has ", values.size(),
             " values for ", num_axes, " spatial axes");
  return values;
}

Shape output_shape(const OpCall& op, const Geometry& g) {
  const size_t rank = g.x.size();
  op.require(rank >= 3 && g.weight.size() == rank,
             "x and weight have the same number of axes, at least three");
  op.require(is_valid_shape(g.x) && is_valid_shape(g.weight) &&
                 num_elements(g.weight) > 0,
             "x and weight have valid shapes, and weight is not empty");
  op.require(g.x[1] % g.groups == 0 && g.weight[0] % g.groups == 0,
             "the groups divide the channels");
  op.require(g.x[1] == (g.transposed ? g.weight[0] : g.weight[1] * g.groups),
             "x has the number of channels that the weight expects");
  Shape y{g.x[0], g.transposed ? g.weight[1] * g.groups : g.weight[0]};
  for (size_t i = 0; i + 2 < rank; ++i) {
    const int64_t step = std::max(g.stride[i], g.dilation[i]);
    const int64_t in = g.x[i + 2];
    op.require(std::max({in, g.weight[i + 2], step, g.padding[i]}) < kMost,
               "sizes, strides, dilations and padding are less than 2^30");
    op.require(!g.transposed || g.output_padding[i] < step,
               "output_padding is less than stride or dilation");
    const int64_t kernel = g.dilation[i] * (g.weight[i + 2] - 1) + 1;
    const int64_t room = in + 2 * g.padding[i] - kernel;
    op.require(g.transposed || room >= 0,
               "the kernel fits into the padded input");
    y.push_back(g.transposed ? (in - 1) * g.stride[i] - 2 * g.padding[i] +
                                   kernel + g.output_padding[i]
                             : room / g.stride[i] + 1);
    op.require(y.back() > 0, "the result has at least one value on each axis");
  }
  return y;
}

Geometry read_geometry(const OpCall& op, const Shape& x, const Shape& weight) {
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

void check_operands(const OpCall& op) {
  op.require_one_dtype();
  static_cast<void>(has_half_partials(op));
  check_precision(op);
}

void check_grad_y(const OpCall& op, const Geometry& g) {
  op.require(op.input(kGradY).shape == g.y,
             "the gradient has the shape of the convolution's output, ",
             to_string(g.y));
}

// The kernel is applied at each result of a convolution, or at each input of a
// transposed one.
graph::Convolution arithmetic_of(const OpCall& op, const Geometry& g) {
  const Shape& used = g.transposed ? g.x : g.y;
  const auto product = [](const Shape& shape) {
    return num_elements({shape.begin() + 2, shape.end()});
  };
  return {.batch = g.x[0],
          .positions = product(used),
          .kernel = product(g.weight),
          .groups = g.groups,
          .in_channels = g.x[1] / g.groups,
          .out_channels = g.y[1] / g.groups,
          .dtype = op.input(0).dtype};
}

}  // namespace

Geometry forward_geometry(const OpCall& op) {
  return read_geometry(op, op.input(kX).shape, op.input(kWeight).shape);
}

Geometry grad_input_geometry(const OpCall& op) {
  return read_geometry(op, op.attribute<Ints>("input_shape"),
                       op.input(kWeight).shape);
}

Geometry grad_weight_geometry(const OpCall& op) {
  return read_geometry(op, op.input(kForwardX).shape,
                       op.attribute<Ints>("weight_shape"));
}

std::vector<graph::Work> forward_work(const OpView& op) {
  return {arithmetic_of(op, forward_geometry(op))};
}

std::vector<graph::Work> grad_input_work(const OpView& op) {
  return {arithmetic_of(op, grad_input_geometry(op))};
}

std::vector<graph::Work> grad_weight_work(const OpView& op) {
  return {arithmetic_of(op, grad_weight_geometry(op))};
}

std::vector<TensorType> forward_type(const OpCall& op) {
  check_operands(op);
  const Geometry g = forward_geometry(op);
  if (op.has_input(kBias)) op.require_shape(kBias, {g.y[1]});
  return {{op.input(kX).dtype, g.y}};
}

std::vector<TensorType> grad_input_type(const OpCall& op) {
  check_operands(op);
  const Geometry g = grad_input_geometry(op);
  check_grad_y(op, g);
  return {{op.input(kGradY).dtype, g.x}};
}

std::vector<TensorType> grad_weight_type(const OpCall& op) {
  check_operands(op);
  const Geometry g = grad_weight_geometry(op);
  check_grad_y(op, g);
  return {{op.input(kGradY).dtype, g.weight}};
}

}  // namespace popsim::ops
