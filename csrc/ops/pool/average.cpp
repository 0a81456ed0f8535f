// Average pooling, with fixed windows or adaptive ones, and its gradient.
#include <algorithm>

#include "ops/op_def.h"
#include "ops/operands/float_operand.h"
#include "ops/pool/windows.h"
#include "ops/work.h"

namespace popsim::ops {
namespace {

// The divisor of the sum over a window.
class Divisor {
 public:
  explicit Divisor(const OpView& op)
      : fixed_(op.attribute<int64_t>("divisor")),
        with_padding_(op.attribute<bool>("count_include_pad")) {}

  [[nodiscard]] float of(const PoolWindow& down,
                         const PoolWindow& across) const {
    if (fixed_ != 0) return static_cast<float>(fixed_);
    if (with_padding_) return static_cast<float>(down.full * across.full);
    return static_cast<float>((down.last - down.first) *
                              (across.last - across.first));
  }

 private:
  int64_t fixed_;  // 0: the size of the window
  bool with_padding_;
};

// Computes the pooling, or the gradient of its input.
template <bool kGradient>
class AveragePool final : public Kernel {
 public:
  explicit AveragePool(const OpView& op)
      : g_(read_pool(op, kGradient ? op.output(0).shape : op.input(0).shape)),
        divisor_(op),
        last_(pool_channels_last(op, {})),
        from_(pool_input(op, 0, last_, workspace_)),
        to_(op.output_id(0), op.output(0), workspace_) {
    check_pool_layouts(op, {}, last_);
  }

  void run(const RunContext& context) override {
    char* workspace = workspace_.memory();
    const float* from = from_.load(context, workspace);
    float* to = to_.buffer(context, workspace);
    // A unit of work is an image if the channels are last, otherwise a channel.
    const int64_t size = last_ ? g_.channels : 1;
    const int64_t count = last_ ? g_.batch : g_.batch * g_.channels;
    const int64_t image = g_.input_size() * size;
    const int64_t pooled = g_.output_size() * size;
    const threads::Shares shares(threads::additions(count * (image + pooled)),
                                 count);
    shares.run([&](int64_t /*share*/, threads::Range images) {
      for (int64_t i = images.begin; i < images.end; ++i) {
        if constexpr (kGradient) {
          spread(from + i * pooled, size, to + i * image);
        } else {
          pool(from + i * image, size, to + i * pooled);
        }
      }
    });
    to_.store(context, workspace);
  }

 private:
  void pool(const float* x, int64_t channels, float* y) const {
    for (const PoolWindow& down : g_.down) {
      for (const PoolWindow& across : g_.across) {
        pool_window(x, channels, down, across, y);
        y += channels;
      }
    }
  }

  void pool_window(const float* x, int64_t channels, const PoolWindow& down,
                   const PoolWindow& across, float* __restrict y) const {
    std::fill_n(y, channels, 0.0f);
    for_each_position(g_, down, across, [&](int64_t position) {
      const float* __restrict values = x + position * channels;
      for (int64_t c = 0; c < channels; ++c) y[c] += values[c];
    });
    const float divisor = divisor_.of(down, across);
    for (int64_t c = 0; c < channels; ++c) y[c] /= divisor;
  }

  void spread(const float* grad_y, int64_t channels, float* grad_x) const {
    std::fill_n(grad_x, g_.input_size() * channels, 0.0f);
    for (const PoolWindow& down : g_.down) {
      for (const PoolWindow& across : g_.across) {
        const float divisor = divisor_.of(down, across);
        for_each_position(g_, down, across, [&](int64_t position) {
          float* __restrict out = grad_x + position * channels;
          for (int64_t c = 0; c < channels; ++c) out[c] += grad_y[c] / divisor;
        });
        grad_y += channels;
      }
    }
  }

  PoolGeometry g_;
  Divisor divisor_;
  bool last_;
  Workspace workspace_;
  FloatInput from_;
  FloatOutput to_;
};

}  // namespace

extern const OpDef kAveragePool{
    .name = "average_pool",
    .schema =
        "average_pool(Tensor{floats} x, *, int{1..}[2]? kernel, "
        "int{1..}[2]? stride, int{0..}[2]? padding, int{1..}[2]? dilation, "
        "bool? ceil, int{0..}[2]? output_size, bool count_include_pad=False, "
        "int divisor=0) -> Tensor",
    .family = "pool",
    .shape =
        [](const OpCall& op) {
          return std::vector<TensorType>{
              {op.input(0).dtype, pooled_shape(op, op.input(0).shape)}};
        },
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<AveragePool<false>>(op);
    },
    .work = pool_work,
    .outputs = OutputLayout::kImage,
    .layer = true,
    .only_overflows = true,
};

extern const OpDef kAveragePoolGrad{
    .name = "average_pool_grad",
    .schema =
        "average_pool_grad(Tensor{floats} grad_y, *, int{1..}[4] input_shape, "
        "int{1..}[2]? kernel, int{1..}[2]? stride, int{0..}[2]? padding, "
        "int{1..}[2]? dilation, bool? ceil, int{0..}[2]? output_size, "
        "bool count_include_pad=False, int divisor=0) -> Tensor",
    .family = "pool",
    .shape =
        [](const OpCall& op) {
          const Shape& x = op.attribute<std::vector<int64_t>>("input_shape");
          op.require_shape(0, pooled_shape(op, x));
          return std::vector<TensorType>{{op.input(0).dtype, x}};
        },
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<AveragePool<true>>(op);
    },
    .work = pool_grad_work,
    .outputs = OutputLayout::kImage,
    .layer = true,
};

}  // namespace popsim::ops
