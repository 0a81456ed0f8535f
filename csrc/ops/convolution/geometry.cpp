#include "ops/convolution/geometry.h"

#include <algorithm>
#include <initializer_list>
#include <string_view>

namespace popsim::ops {
namespace {

using Geometry = ConvolutionGeometry;
using Ints = std::vector<int64_t>;

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

}  // namespace

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

}  // namespace popsim::ops
