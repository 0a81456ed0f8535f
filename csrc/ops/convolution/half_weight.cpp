// The gradient of a convolution's weight with half partials: the gradient of
// the output, with one row for each output channel, times the patches of the
// input.
#include <algorithm>

#include "base/numbers.h"
#include "dense/vector/panels.h"
#include "ops/convolution/half.h"
#include "ops/convolution/patch_map.h"
#include "ops/operands/float_operand.h"
#include "threads/tasks.h"

namespace popsim::ops {
namespace {

using dense::kGroupRows;
using dense::kLanes;
using Geometry = ConvolutionGeometry;

// How many positions' patches are gathered at a time: whole passes.
constexpr int64_t kChunk = 16 * dense::kPassLength;

FloatInput in_order(const OpView& op, size_t i, const std::vector<size_t>& axes,
                    Workspace& workspace) {
  const graph::Tensor& tensor = op.input(i);
  return {{op.input_id(i), tensor.dtype, tensor.shape, tensor.strides},
          axes,
          false,
          workspace};
}

FloatInput channels_last(const OpView& op, size_t i, Workspace& workspace) {
  const size_t rank = op.input(i).shape.size();
  return in_order(op, i, axes_in(dense::Order::kChannelsLast, rank), workspace);
}

// Returns a row for each channel, with the positions of all images.
FloatInput channels_outermost(const OpView& op, size_t i,
                              Workspace& workspace) {
  std::vector<size_t> axes =
      axes_in(dense::Order::kChannelsFirst, op.input(i).shape.size());
  std::swap(axes[0], axes[1]);
  return in_order(op, i, axes, workspace);
}

class HalfWeightGradient final : public Kernel {
 public:
  HalfWeightGradient(const OpView& op, const Geometry& g)
      : HalfWeightGradient(op, g, dense_spec(g)) {}

  void run(const RunContext& context) override {
    char* workspace = workspace_.memory();
    const float* input = input_.load(context, workspace);
    const float* rows = output_.load(context, workspace);
    float* out = grad_weight_.buffer(context, workspace);
    shares_.run([&](int64_t share, threads::Range units) {
      float* patches = reinterpret_cast<float*>(workspace + scratch_offset_) +
                       share * scratch_floats();
      float* sums = patches + kChunk * width();
      for (int64_t unit = units.begin; unit < units.end; ++unit) {
        multiply(input, rows, unit, patches, sums);
        store(unit, sums, out);
      }
    });
    grad_weight_.store(context, workspace);
  }

 private:
  HalfWeightGradient(const OpView& op, const Geometry& g,
                     const dense::ConvolutionSpec& spec)
      : map_(PatchMap::forward(spec)),
        groups_(spec.groups),
        in_channels_(spec.in_channels / spec.groups),
        out_channels_(spec.out_channels / spec.groups),
        depth_(spec.batch * map_.num_targets()),
        columns_(in_channels_ * map_.kernel_size()),
        vectors_(std::min(dense::kMaxPanelVectors, ceil_div(columns_, kLanes))),
        shares_(threads::multiplications(depth_ * columns_ * groups_ *
                                         out_channels_),
                num_units()),
        input_(
            channels_last(op, g.transposed ? kGradY : kForwardX, workspace_)),
        output_(channels_outermost(op, g.transposed ? kForwardX : kGradY,
                                   workspace_)),
        grad_weight_(op.output_id(0), op.output(0), workspace_),
        scratch_offset_(workspace_.add(
            static_cast<size_t>(shares_.limit() * scratch_floats()) *
            sizeof(float))) {
    check_internal(op.output(0).contiguous(), "convolution_grad_weight '",
                   op.op().name, "': the weight's gradient is not contiguous");
  }

  [[nodiscard]] int64_t width() const { return vectors_ * kLanes; }
  [[nodiscard]] int64_t panels() const { return ceil_div(columns_, width()); }
  [[nodiscard]] int64_t num_units() const { return groups_ * panels(); }
  [[nodiscard]] int64_t scratch_floats() const {
    return (kChunk + out_channels_) * width();
  }

  // Multiplies all rows of a group with some columns. A column is a position of
  // the kernel in one channel of the input.
  void multiply(const float* input, const float* rows, int64_t unit,
                float* patches, float* sums) const {
    const int64_t group = unit / panels();
    for (int64_t d = 0; d < depth_; d += kChunk) {
      const int64_t count = std::min(kChunk, depth_ - d);
      for (int64_t i = 0; i < count; ++i) {
        gather(input, group, unit % panels(), d + i, patches + i * width());
      }
      for (int64_t row = 0; row < out_channels_; row += kGroupRows) {
        dense::multiply_passes(
            patches, vectors_,
            rows + (group * out_channels_ + row) * depth_ + d, depth_,
            std::min(kGroupRows, out_channels_ - row), count,
            dense::passes_of(count), d > 0, sums + row * width());
      }
    }
  }

  // Reads one row of a panel, with zeros outside the image and after the last
  // column.
  void gather(const float* input, int64_t group, int64_t panel, int64_t row,
              float* out) const {
    const int64_t channels = groups_ * in_channels_;
    const float* image =
        input + row / map_.num_targets() * map_.num_sources() * channels +
        group * in_channels_;
    const int32_t* positions = map_.sources(row % map_.num_targets());
    const int64_t end = std::min(columns_, (panel + 1) * width());
    float* end_of_row = out + width();
    for (int64_t column = panel * width(); column < end;) {
      const int64_t k = column / in_channels_;
      const int64_t channel = column % in_channels_;
      const int64_t count = std::min(in_channels_ - channel, end - column);
      if (positions[k] < 0) {
        std::fill_n(out, count, 0.0f);
      } else {
        std::copy_n(image + positions[k] * channels + channel, count, out);
      }
      out += count;
      column += count;
    }
    std::fill(out, end_of_row, 0.0f);
  }

  void store(int64_t unit, const float* sums, float* out) const {
    const int64_t group = unit / panels();
    const int64_t first = unit % panels() * width();
    const int64_t count = std::min(width(), columns_ - first);
    for (int64_t row = 0; row < out_channels_; ++row) {
      float* to = out + (group * out_channels_ + row) * columns_;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t k = (first + i) / in_channels_;
        const int64_t channel = (first + i) % in_channels_;
        to[channel * map_.kernel_size() + k] = sums[row * width() + i];
      }
    }
  }

  Workspace workspace_;
  PatchMap map_;
  int64_t groups_;
  // The channels of one group.
  int64_t in_channels_;
  int64_t out_channels_;
  int64_t depth_;
  int64_t columns_;
  int64_t vectors_;
  threads::Shares shares_;
  FloatInput input_;
  FloatInput output_;
  FloatOutput grad_weight_;
  size_t scratch_offset_;
};

}  // namespace

std::unique_ptr<Kernel> create_half_weight_gradient(const OpView& op,
                                                    const Geometry& geometry) {
  return std::make_unique<HalfWeightGradient>(op, geometry);
}

}  // namespace popsim::ops
