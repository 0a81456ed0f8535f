#include "dense/convolution.h"

#if defined(POPSIM_HAVE_ONEDNN)
#include <algorithm>
#include <functional>
#include <initializer_list>
#include <numeric>
#include <optional>
#include <utility>

#include "base/check.h"
#include "dense/available.h"
#include "dense/onednn.h"
#include "dense/tile/convolution.h"
#include "threads/budget.h"
#include "threads/work.h"

namespace popsim::dense {
namespace {

using dnnl::memory;
using Dims = memory::dims;

// What the primitive computes with.
enum class Layout : int8_t {
  kBlocked,       // oneDNN's choice: fast code behind a reorder at each edge
  kChannelsLast,  // as fast, and without reorders where the tensors agree
  kPlain,         // a matrix product per image, on channels-first tensors
};

struct Sizes {
  Dims input;
  Dims weight;
  Dims bias;
  Dims output;
};

Dims joined(Dims first, const Extents& rest) {
  first.insert(first.end(), rest.begin(), rest.end());
  return first;
}

Sizes sizes_of(const ConvolutionSpec& spec) {
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

int64_t product(const Dims& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1},
                         std::multiplies<>());
}

int64_t num_multiplications(const ConvolutionSpec& spec) {
  const Sizes sizes = sizes_of(spec);
  return product(sizes.output) *
         (product(sizes.weight) / std::max<int64_t>(spec.out_channels, 1));
}

// oneDNN derives the output size with padding on both ends, like us.
bool is_consistent(const ConvolutionSpec& spec) {
  for (size_t i = 0; i < spec.input_size.size(); ++i) {
    const int64_t kernel = spec.dilation[i] * (spec.kernel_size[i] - 1) + 1;
    const int64_t room = spec.input_size[i] + 2 * spec.padding[i] - kernel;
    if (room < 0 || room / spec.stride[i] + 1 != spec.output_size[i]) {
      return false;
    }
  }
  return true;
}

bool all_equal(const Extents& values, int64_t value) {
  return std::ranges::all_of(values, [&](int64_t v) { return v == value; });
}

Dims strides_in(Order order, const Dims& sizes) {
  if (order == Order::kChannelsFirst) return contiguous_strides(sizes);
  Dims moved = sizes;
  std::rotate(moved.begin() + 1, moved.begin() + 2, moved.end());
  Dims strides = contiguous_strides(moved);
  std::rotate(strides.begin() + 1, strides.end() - 1, strides.end());
  return strides;
}

// Faster layout first.
std::vector<Layout> candidates(const ConvolutionSpec& spec,
                               ConvolutionPass pass) {
  if (spec.input_order == Order::kChannelsLast ||
      spec.output_order == Order::kChannelsLast) {
    return {Layout::kChannelsLast, Layout::kBlocked, Layout::kPlain};
  }
  // A pointwise convolution is a matrix product already. Over large images,
  // moving its operands into blocks takes a third of the time.
  const bool pointwise =
      all_equal(spec.kernel_size, 1) && all_equal(spec.stride, 1) &&
      all_equal(spec.padding, 0) && product(spec.output_size) >= 256;
  // A block holds 16 channels: with much fewer, most of the work is padding.
  // (Forward, oneDNN has code for such inputs.)
  const bool few_channels = spec.in_channels <= 4;
  const bool plain_first =
      spec.groups == 1 &&
      ((pointwise && pass != ConvolutionPass::kGradWeight) ||
       (few_channels && pass == ConvolutionPass::kGradInput));
  if (plain_first) return {Layout::kPlain, Layout::kBlocked};
  return {Layout::kBlocked, Layout::kPlain};
}

// The descriptor of one pass, in the form that all passes share.
struct Described {
  dnnl::primitive primitive;
  memory::desc input;
  memory::desc weight;
  memory::desc bias;
  memory::desc output;
  memory::desc scratchpad;
};

class Describer {
 public:
  Describer(const ConvolutionSpec& spec, Layout layout)
      : spec_(spec), strides_(spec.stride), padding_(spec.padding) {
    for (const int64_t dilation : spec.dilation) {
      dilations_.push_back(dilation - 1);
    }
    const Sizes sizes = sizes_of(spec);
    input_ = activation(sizes.input, layout);
    output_ = activation(sizes.output, layout);
    weight_ = any(sizes.weight);
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

  // Also the hint that the gradients ask for.
  dnnl::convolution_forward::primitive_desc forward_desc(
      const dnnl::primitive_attr& attributes = user_scratchpad()) const {
    return {cpu(),      dnnl::prop_kind::forward_training,
            kAlgorithm, input_,
            weight_,    bias_,
            output_,    strides_,
            dilations_, padding_,
            padding_,   attributes,
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
        padding_, padding_, hint, user_scratchpad(), kAllowEmpty);
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
        cpu(), kAlgorithm, input_, weight_, bias_, output_, strides_,
        dilations_, padding_, padding_, hint, user_scratchpad(), kAllowEmpty);
    if (!desc || !is_fast(desc)) return std::nullopt;
    return Described{dnnl::convolution_backward_weights(desc),
                     desc.src_desc(),
                     desc.diff_weights_desc(),
                     bias_,
                     desc.diff_dst_desc(),
                     desc.scratchpad_desc()};
  }

  const ConvolutionSpec& spec_;
  Dims strides_;
  Dims padding_;
  Dims dilations_;
  memory::desc input_;
  memory::desc weight_;
  memory::desc bias_;  // empty where the spec has none
  memory::desc output_;
};

class PrimitiveConvolution final : public Convolution {
 public:
  PrimitiveConvolution(const ConvolutionSpec& spec, ConvolutionPass pass,
                       const Described& described, int64_t num_threads)
      : num_threads_(num_threads), stream_(cpu()) {
    const Sizes sizes = sizes_of(spec);
    input_ = make_operand(sizes.input, spec.input_order, described.input);
    weight_ =
        make_operand(sizes.weight, Order::kChannelsFirst, described.weight);
    output_ = make_operand(sizes.output, spec.output_order, described.output);
    if (!described.bias.is_zero()) {
      bias_ = make_operand(sizes.bias, Order::kChannelsFirst, described.bias);
    }
    add_steps(pass, described);
    scratchpad_offset_ = plan_.add(scratchpad_bytes_);
  }

  size_t workspace_bytes() const override { return plan_.bytes(); }

  void run(const ConvolutionTensors& tensors, void* workspace) override {
    auto* start = static_cast<char*>(workspace);
    bind(input_, tensors.input, start);
    bind(weight_, tensors.weight, start);
    bind(output_, tensors.output, start);
    if (bias_) bind(*bias_, tensors.bias, start);
    for (memory& scratchpad : scratchpads_) {
      scratchpad.set_data_handle(start + scratchpad_offset_);
    }
    const threads::ScopedBudget budget(num_threads_);
    for (const Step& step : steps_) step.execute(stream_);
  }

 private:
  using Arguments = std::vector<std::pair<int, memory>>;

  // A tensor in the caller's memory, and in the layout that the primitive
  // wants.
  struct Operand {
    memory plain;
    memory blocked;  // the same object as `plain` where the layouts agree
    std::optional<size_t> offset;  // of `blocked` in the workspace
  };

  Operand make_operand(const Dims& sizes, Order order,
                       const memory::desc& wanted) {
    const memory::desc desc = plain_desc(sizes, strides_in(order, sizes));
    Operand operand{unbound(desc), {}, std::nullopt};
    if (desc == wanted) {
      operand.blocked = operand.plain;
    } else {
      operand.blocked = unbound(wanted);
      operand.offset = plan_.add(wanted.get_size());
    }
    return operand;
  }

  static void bind(Operand& operand, float* tensor, char* workspace) {
    operand.plain.set_data_handle(tensor);
    if (operand.offset) {
      operand.blocked.set_data_handle(workspace + *operand.offset);
    }
  }

  void add_steps(ConvolutionPass pass, const Described& described) {
    Arguments arguments;
    if (bias_) {
      arguments.emplace_back(pass == ConvolutionPass::kForward
                                 ? DNNL_ARG_BIAS
                                 : DNNL_ARG_DIFF_BIAS,
                             bias_->blocked);
    }
    switch (pass) {
      case ConvolutionPass::kForward:
        arguments.insert(arguments.end(), {{DNNL_ARG_SRC, input_.blocked},
                                           {DNNL_ARG_WEIGHTS, weight_.blocked},
                                           {DNNL_ARG_DST, output_.blocked}});
        add_steps({&input_, &weight_}, described, arguments, output_);
        return;
      case ConvolutionPass::kGradInput:
        arguments.insert(arguments.end(),
                         {{DNNL_ARG_DIFF_SRC, input_.blocked},
                          {DNNL_ARG_WEIGHTS, weight_.blocked},
                          {DNNL_ARG_DIFF_DST, output_.blocked}});
        add_steps({&output_, &weight_}, described, arguments, input_);
        return;
      case ConvolutionPass::kGradWeight:
        arguments.insert(arguments.end(),
                         {{DNNL_ARG_SRC, input_.blocked},
                          {DNNL_ARG_DIFF_WEIGHTS, weight_.blocked},
                          {DNNL_ARG_DIFF_DST, output_.blocked}});
        add_steps({&output_, &input_}, described, arguments, weight_);
        return;
    }
  }

  // Operands into their layouts, the primitive, the result out of its layout.
  void add_steps(std::initializer_list<const Operand*> read,
                 const Described& described, Arguments& arguments,
                 const Operand& written) {
    for (const Operand* operand : read) {
      add_reorder(operand->plain, operand->blocked);
    }
    add_step(described.primitive, arguments, described.scratchpad);
    add_reorder(written.blocked, written.plain);
  }

  void add_reorder(const memory& from, const memory& to) {
    if (from == to) return;
    const dnnl::reorder::primitive_desc desc(cpu(), from.get_desc(), cpu(),
                                             to.get_desc(), user_scratchpad());
    add_step(dnnl::reorder(desc), {{DNNL_ARG_FROM, from}, {DNNL_ARG_TO, to}},
             desc.scratchpad_desc());
  }

  void add_step(const dnnl::primitive& primitive, Arguments arguments,
                const memory::desc& scratchpad) {
    scratchpads_.push_back(unbound(scratchpad));
    scratchpad_bytes_ = std::max(scratchpad_bytes_, scratchpad.get_size());
    arguments.emplace_back(DNNL_ARG_SCRATCHPAD, scratchpads_.back());
    steps_.emplace_back(primitive, arguments);
  }

  Operand input_;
  Operand weight_;
  Operand output_;
  std::optional<Operand> bias_;
  std::vector<memory> scratchpads_;  // all in one place: the steps take turns
  size_t scratchpad_bytes_ = 0;
  size_t scratchpad_offset_ = 0;
  WorkspacePlan plan_;
  std::vector<Step> steps_;
  int64_t num_threads_;
  dnnl::stream stream_;
};

std::unique_ptr<Convolution> create_convolution(const ConvolutionSpec& spec,
                                                ConvolutionPass pass) {
  const int64_t num_threads =
      std::min(threads::multiplications(num_multiplications(spec)).threads,
               threads::budget());
  const threads::ScopedBudget budget(num_threads);
  for (const Layout layout : candidates(spec, pass)) {
    if (const auto described = Describer(spec, layout).describe(pass)) {
      return std::make_unique<PrimitiveConvolution>(spec, pass, *described,
                                                    num_threads);
    }
  }
  return nullptr;
}

}  // namespace
}  // namespace popsim::dense
#endif

namespace popsim::dense {

#if defined(POPSIM_HAVE_ONEDNN)
std::unique_ptr<Convolution> Convolution::create(const ConvolutionSpec& spec,
                                                 ConvolutionPass pass) {
  if (!available() || num_multiplications(spec) == 0 || !is_consistent(spec)) {
    return nullptr;
  }
  try {
    return with_tile_units(create_convolution(spec, pass), spec, pass);
  } catch (const dnnl::error&) {
    return nullptr;
  }
}
#else
std::unique_ptr<Convolution> Convolution::create(const ConvolutionSpec&,
                                                 ConvolutionPass) {
  return nullptr;
}
#endif

}  // namespace popsim::dense
