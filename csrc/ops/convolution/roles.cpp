#include "ops/convolution/roles.h"

#include <algorithm>
#include <numeric>

namespace popsim::ops {

using dense::ConvolutionPass;
using dense::ConvolutionTensors;
using dense::Order;
using Geometry = ConvolutionGeometry;

namespace {

ConvolutionSlot place_of_x(const Geometry& g) {
  return g.transposed ? &ConvolutionTensors::output
                      : &ConvolutionTensors::input;
}

ConvolutionSlot place_of_y(const Geometry& g) {
  return g.transposed ? &ConvolutionTensors::input
                      : &ConvolutionTensors::output;
}

}  // namespace

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

ConvolutionRoles forward_roles(const OpView& op, const Geometry& g) {
  ConvolutionRoles roles{
      .pass = g.transposed ? ConvolutionPass::kGradInput
                           : ConvolutionPass::kForward,
      .inputs = {{kX, place_of_x(g)}, {kWeight, &ConvolutionTensors::weight}},
      .outputs = {{0, place_of_y(g)}},
      .bias = op.has_input(kBias)};
  if (roles.bias) roles.inputs.emplace_back(kBias, &ConvolutionTensors::bias);
  return roles;
}

ConvolutionRoles grad_input_roles(const OpView&, const Geometry& g) {
  return {.pass = g.transposed ? ConvolutionPass::kForward
                               : ConvolutionPass::kGradInput,
          .inputs = {{kGradY, place_of_y(g)},
                     {kWeight, &ConvolutionTensors::weight}},
          .outputs = {{0, place_of_x(g)}},
          .bias = false};
}

ConvolutionRoles grad_weight_roles(const OpView&, const Geometry& g) {
  return {.pass = ConvolutionPass::kGradWeight,
          .inputs = {{kGradY, place_of_y(g)}, {kForwardX, place_of_x(g)}},
          .outputs = {{0, &ConvolutionTensors::weight}},
          .bias = false};
}

std::vector<size_t> axes_in(Order order, size_t rank) {
  std::vector<size_t> axes(rank);
  std::iota(axes.begin(), axes.end(), size_t{0});
  if (order == Order::kChannelsLast) {
    std::rotate(axes.begin() + 1, axes.begin() + 2, axes.end());
  }
  return axes;
}

}  // namespace popsim::ops
