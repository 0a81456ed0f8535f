#if defined(POPSIM_HAVE_ONEDNN)
#include "dense/onednn_convolution.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "base/check.h"

namespace popsim::dense {
namespace {

using dnnl::memory;
using Dims = memory::dims;

int64_t product(const Extents& values) {
  return std::accumulate(values.begin(), values.end(), int64_t{1},
                         std::multiplies<>());
}

Dims joined(Dims first, const Extents& rest) {
  first.insert(first.end(), rest.begin(), rest.end());
  return first;
}

bool all_equal(const Extents& values, int64_t value) {
  return std::ranges::all_of(values, [&](int64_t v) { return v == value; });
}

class Describer {
 public:
  Describer(const PieceShape& shape, Layout layout, const memory::desc& weight)
      : strides_(shape.spec.stride),
        padding_(shape.spec.padding),
        padding_end_(shape.padding_end) {
    const ConvolutionSpec& spec = shape.spec;
    for (const int64_t dilation : spec.dilation) {
      dilations_.push_back(dilation - 1);
    }
    const ConvolutionSizes sizes = sizes_of(spec);
    input_ = activation(sizes.input, layout);
    output_ = activation(sizes.output, layout);
    weight_ = weight.is_zero() ? any(sizes.weight) : weight;
    if (spec.bias) {
      bias_ = plain_desc(sizes.bias, contiguous_strides(sizes.bias));
    }
  }

  std::optional<Described> describe(ConvolutionPass pass) const {
    switch (pass) {
      case ConvolutionPass::kForward:
        return forward();
      case ConvolutionPass::kGradInput:
        return grad_input();
      case ConvolutionPass::kGradWeight:
        return grad_weight();
    }
    throw InternalError("dense::Convolution: not a pass");
  }

 private:
  static constexpr auto kAlgorithm = dnnl::algorithm::convolution_direct;
  static constexpr bool kAllowEmpty = true;

  static memory::desc any(const Dims& sizes) {
    return {sizes, memory::data_type::f32, memory::format_tag::any};
  }
  static memory::desc activation(const Dims& sizes, Layout layout) {
    if (layout == Layout::kBlocked) return any(sizes);
    const Order order = layout == Layout::kChannelsLast ? Order::kChannelsLast
                                                        : Order::kChannelsFirst;
    return plain_desc(sizes, strides_in(order, sizes));
  }

  // This is also the hint that the descriptors of the gradients need.
  dnnl::convolution_forward::primitive_desc forward_desc(
      const dnnl::primitive_attr& attributes = user_scratchpad()) const {
    return {cpu(),        dnnl::prop_kind::forward_training,
            kAlgorithm,   input_,
            weight_,      bias_,
            output_,      strides_,
            dilations_,   padding_,
            padding_end_, attributes,
            kAllowEmpty};
  }

  std::optional<Described> forward() const {
    const auto desc = forward_desc(user_scratchpad());
    if (!desc || !is_fast(desc)) return std::nullopt;
    return Described{dnnl::convolution_forward(desc),
                     desc.src_desc(),
                     desc.weights_desc(),
                     bias_,
                     desc.dst_desc(),
                     desc.scratchpad_desc()};
  }

  std::optional<Described> grad_input() const {
    const auto hint = forward_desc();
    if (!hint) return std::nullopt;
    const dnnl::convolution_backward_data::primitive_desc desc(
        cpu(), kAlgorithm, input_, weight_, output_, strides_, dilations_,
        padding_, padding_end_, hint, user_scratchpad(), kAllowEmpty);
    if (!desc || !is_fast(desc)) return std::nullopt;
    return Described{dnnl::convolution_backward_data(desc),
                     desc.diff_src_desc(),
                     desc.weights_desc(),
                     memory::desc(),
                     desc.diff_dst_desc(),
                     desc.scratchpad_desc()};
  }

  std::optional<Described> grad_weight() const {
    const auto hint = forward_desc();
    if (!hint) return std::nullopt;
    const dnnl::convolution_backward_weights::primitive_desc desc(
        cpu(), kAlgorithm, input_, weight_, output_, strides_, dilations_,
        padding_, padding_end_, hint, user_scratchpad(), kAllowEmpty);
    if (!desc || !is_fast(desc)) return std::nullopt;
    return Described{dnnl::convolution_backward_weights(desc),
                     desc.src_desc(),
                     desc.diff_weights_desc(),
                     memory::desc(),
                     desc.diff_dst_desc(),
                     desc.scratchpad_desc()};
  }

  Dims strides_;
  Dims padding_;
  Dims padding_end_;
  Dims dilations_;
  memory::desc input_;
  memory::desc weight_;
  memory::desc bias_;  // empty if the spec has no bias
  memory::desc output_;
};

}  // namespace

ConvolutionSizes sizes_of(const ConvolutionSpec& spec) {
  const int64_t out = spec.out_channels;
  const int64_t in = spec.in_channels;
  const int64_t groups = spec.groups;
  return {joined({spec.batch, in}, spec.input_size),
          groups == 1
              ? joined({out, in}, spec.kernel_size)
              : joined({groups, out / groups, in / groups}, spec.kernel_size),
          {out},
          joined({spec.batch, out}, spec.output_size)};
}

Dims strides_in(Order order, const Dims& sizes) {
  if (order == Order::kChannelsFirst) return contiguous_strides(sizes);
  Dims moved = sizes;
  std::rotate(moved.begin() + 1, moved.begin() + 2, moved.end());
  Dims strides = contiguous_strides(moved);
  std::rotate(strides.begin() + 1, strides.end() - 1, strides.end());
  return strides;
}

std::vector<Layout> layouts_for(const ConvolutionSpec& spec,
                                ConvolutionPass pass) {
  if (spec.input_order == Order::kChannelsLast ||
      spec.output_order == Order::kChannelsLast) {
    return {Layout::kChannelsLast, Layout::kBlocked, Layout::kPlain};
  }
  // A pointwise convolution is a matrix product already. For large images,
  // moving its operands into blocks takes a third of the time.
  const bool pointwise =
      all_equal(spec.kernel_size, 1) && all_equal(spec.stride, 1) &&
      all_equal(spec.padding, 0) && product(spec.output_size) >= 256;
  // A block has 16 channels: with far fewer channels, most of the work is
  // padding. (Forward, oneDNN has code for such inputs.)
  const bool few_channels = spec.in_channels <= 4;
  const bool plain_first =
      spec.groups == 1 &&
      ((pointwise && pass != ConvolutionPass::kGradWeight) ||
       (few_channels && pass == ConvolutionPass::kGradInput));
  if (plain_first) return {Layout::kPlain, Layout::kBlocked};
  return {Layout::kBlocked, Layout::kPlain};
}

std::optional<Described> describe(const PieceShape& shape, Layout layout,
                                  ConvolutionPass pass,
                                  const memory::desc& weight) {
  return Describer(shape, layout, weight).describe(pass);
}

}  // namespace popsim::dense
#endif
