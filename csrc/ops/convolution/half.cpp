#include "ops/convolution/half.h"

#include <algorithm>
#include <optional>

#include "base/numbers.h"
#include "dense/vector/panels.h"
#include "ops/convolution/patch_map.h"
#include "ops/math/vec_math.h"
#include "ops/operands/float_operand.h"
#include "ops/operands/image_layout.h"
#include "threads/tasks.h"

namespace popsim::ops {
namespace {

using dense::kGroupRows;
using dense::kPassLength;
using dense::Panels;
using Geometry = ConvolutionGeometry;

// Channels of one group, and where the weight has them.
struct GroupChannels {
  int64_t count;
  int64_t weight_stride;
};

// One pass from images to images: forward, or the gradient of the input. A row
// is a position of the target; its patch is multiplied with the weight of all
// target channels of the group.
class HalfConvolution final : public Kernel {
 public:
  HalfConvolution(const OpView& op, const Geometry& g,
                  const ConvolutionRoles& roles)
      : HalfConvolution(op, dense_spec(g),
                        roles.pass == dense::ConvolutionPass::kForward,
                        roles.bias) {}

  void run(const RunContext& context) override {
    char* workspace = workspace_.memory();
    const Memory memory{
        .source = source_.load(context, workspace),
        .packed = floats(workspace, packed_offset_),
        .bias = bias_ ? bias_->load(context, workspace) : nullptr,
        .out = out_.buffer(context, workspace)};
    pack(weight_.load(context, workspace), workspace);
    shares_.run([&](int64_t share, threads::Range units) {
      float* patches =
          floats(workspace, patches_offset_) + share * kGroupRows * depth_;
      for (int64_t unit = units.begin; unit < units.end; ++unit) {
        run_unit(memory, unit, patches);
      }
    });
    out_.store(context, workspace);
  }

 private:
  struct Memory {
    const float* source;
    const float* packed;
    const float* bias;
    float* out;
  };

  HalfConvolution(const OpView& op, const dense::ConvolutionSpec& spec,
                  bool forward, bool bias)
      : map_(forward ? PatchMap::forward(spec) : PatchMap::backward(spec)),
        groups_(spec.groups),
        rows_(spec.batch * map_.num_targets()),
        in_channels_{spec.in_channels / spec.groups, map_.kernel_size()},
        out_channels_{spec.out_channels / spec.groups,
                      in_channels_.count * map_.kernel_size()},
        from_(forward ? in_channels_ : out_channels_),
        to_(forward ? out_channels_ : in_channels_),
        depth_(from_.count * map_.kernel_size()),
        panels_(1, to_.count, depth_,
                dense::Passes{from_.count / kPassLength * map_.kernel_size(),
                              from_.count % kPassLength}),
        shares_(threads::multiplications(rows_ * groups_ * depth_ * to_.count),
                num_units()),
        channels_last_(is_channels_last(op.output(0))),
        source_({op.input_id(0), op.input(0).dtype, op.input(0).shape,
                 op.input(0).strides},
                axes_in(dense::Order::kChannelsLast, op.input(0).shape.size()),
                false, workspace_),
        weight_(op.input_id(kWeight), op.input(kWeight), workspace_),
        out_(op.output_id(0), op.output(0), workspace_),
        ordered_offset_(add_floats(groups_ * to_.count * depth_)),
        packed_offset_(add_floats(groups_ * packed_floats())),
        patches_offset_(add_floats(shares_.limit() * kGroupRows * depth_)) {
    if (bias) bias_.emplace(op.input_id(kBias), op.input(kBias), workspace_);
  }

  size_t add_floats(int64_t count) {
    return workspace_.add(static_cast<size_t>(count) * sizeof(float));
  }
  [[nodiscard]] static float* floats(char* workspace, size_t offset) {
    return reinterpret_cast<float*>(workspace + offset);
  }
  [[nodiscard]] int64_t packed_floats() const {
    return panels_.count() * panels_.panel_floats();
  }
  [[nodiscard]] int64_t row_blocks() const {
    return ceil_div(rows_, kGroupRows);
  }
  [[nodiscard]] int64_t num_units() const { return groups_ * row_blocks(); }

  // Calls visit(channel, count, position) for every pass over a patch, in their
  // order.
  template <typename Visit>
  void for_each_pass(const Visit& visit) const {
    for (int64_t channel = 0; channel < from_.count; channel += kPassLength) {
      const int64_t count = std::min(kPassLength, from_.count - channel);
      for (int64_t k = 0; k < map_.kernel_size(); ++k) visit(channel, count, k);
    }
  }

  // Stores the weight of every target channel in the order of the passes, and
  // panels of these.
  void pack(const float* weight, char* workspace) const {
    float* ordered = floats(workspace, ordered_offset_);
    const int64_t columns = groups_ * to_.count;
    const threads::Shares shares(threads::elements(columns * depth_), columns);
    shares.run([&](int64_t /*share*/, threads::Range range) {
      for (int64_t i = range.begin; i < range.end; ++i) {
        order(weight + i / to_.count * to_.count * depth_ +
                  i % to_.count * to_.weight_stride,
              ordered + i * depth_);
      }
    });
    for (int64_t group = 0; group < groups_; ++group) {
      panels_.pack_transposed(
          ordered + group * to_.count * depth_,
          floats(workspace, packed_offset_) + group * packed_floats());
    }
  }

  void order(const float* weight, float* out) const {
    for_each_pass([&](int64_t channel, int64_t count, int64_t k) {
      const float* from = weight + channel * from_.weight_stride + k;
      for (int64_t i = 0; i < count; ++i) {
        *out++ = from[i * from_.weight_stride];
      }
    });
  }

  void run_unit(const Memory& memory, int64_t unit, float* patches) const {
    const int64_t group = unit / row_blocks();
    const int64_t first = unit % row_blocks() * kGroupRows;
    const int64_t count = std::min(kGroupRows, rows_ - first);
    for (int64_t i = 0; i < count; ++i) {
      gather(memory.source, group, first + i, patches + i * depth_);
    }
    panels_.multiply(memory.packed + group * packed_floats(), patches, depth_,
                     {0, count}, {0, panels_.count()},
                     [&](int64_t row, int64_t column, int64_t lanes,
                         const float* product, int64_t /*stride*/) {
                       store(memory, first + row, group * to_.count + column,
                             lanes, product);
                     });
  }

  // Reads the patch of a row, with zeros outside the image.
  void gather(const float* source, int64_t group, int64_t row,
              float* out) const {
    const int64_t channels = groups_ * from_.count;
    const float* image =
        source + row / map_.num_targets() * map_.num_sources() * channels +
        group * from_.count;
    const int32_t* positions = map_.sources(row % map_.num_targets());
    for_each_pass([&](int64_t channel, int64_t count, int64_t k) {
      if (positions[k] < 0) {
        std::fill_n(out, count, 0.0f);
      } else {
        std::copy_n(image + positions[k] * channels + channel, count, out);
      }
      out += count;
    });
  }

  void store(const Memory& memory, int64_t row, int64_t channel, int64_t lanes,
             const float* product) const {
    Vec sum = load(product, kWhole);
    if (memory.bias != nullptr) {
      sum = sum + load(memory.bias + channel, lanes);
    }
    const int64_t channels = groups_ * to_.count;
    if (channels_last_) {
      ops::store(sum, memory.out + row * channels + channel, lanes);
      return;
    }
    alignas(64) float values[kLanes];
    sum.store(values);
    const int64_t positions = map_.num_targets();
    float* out = memory.out +
                 (row / positions * channels + channel) * positions +
                 row % positions;
    for (int64_t i = 0; i < lanes; ++i) out[i * positions] = values[i];
  }

  static constexpr std::integral_constant<int64_t, kLanes> kWhole{};

  Workspace workspace_;
  PatchMap map_;
  int64_t groups_;
  int64_t rows_;
  // The channels of the convolution that this is, or that this is the gradient
  // of.
  GroupChannels in_channels_;
  GroupChannels out_channels_;
  GroupChannels from_;
  GroupChannels to_;
  int64_t depth_;
  Panels panels_;
  threads::Shares shares_;
  bool channels_last_;
  FloatInput source_;
  FloatInput weight_;
  FloatOutput out_;
  std::optional<FloatInput> bias_;
  size_t ordered_offset_;
  size_t packed_offset_;
  size_t patches_offset_;
};

}  // namespace

std::unique_ptr<Kernel> create_half_convolution(const OpView& op,
                                                const Geometry& geometry,
                                                const ConvolutionRoles& roles) {
  for (const Shape* shape : {&geometry.x, &geometry.weight, &geometry.y}) {
    if (num_elements(*shape) == 0) return nullptr;
  }
  if (roles.pass == dense::ConvolutionPass::kGradWeight) {
    return create_half_weight_gradient(op, geometry);
  }
  return std::make_unique<HalfConvolution>(op, geometry, roles);
}

}  // namespace popsim::ops
