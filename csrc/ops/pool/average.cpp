// Average pooling, with fixed windows or adaptive ones, and its gradient.
#include <algorithm>

#include "base/numbers.h"
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
        even_(most_even(g_.across)),
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
  // Calls one(i) for the windows of a row from left to right; for the even ones
  // together, where every channel has an image of its own, it calls even().
  template <typename One, typename Even>
  void for_each_window(int64_t channels, const One& one,
                       const Even& even) const {
    const size_t count = g_.across.size();
    const size_t begin = channels == 1 ? even_.begin : count;
    for (size_t i = 0; i < begin; ++i) one(i);
    if (begin == count) return;
    even();
    for (size_t i = even_.end; i < count; ++i) one(i);
  }

  void pool(const float* x, int64_t channels, float* y) const {
    for (const PoolWindow& down : g_.down) {
      const auto to = [&](size_t i) {
        return y + static_cast<int64_t>(i) * channels;
      };
      for_each_window(
          channels,
          [&](size_t i) {
            pool_window(x, channels, down, g_.across[i], to(i));
          },
          [&] { pool_even(x, down, to(even_.begin)); });
      y = to(g_.across.size());
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

  // Like pool_window for the even windows of a row, together: in the same
  // order, but all add their first number, then all their second one.
  void pool_even(const float* x, const PoolWindow& down,
                 float* __restrict y) const {
    const PoolWindow& first = g_.across[even_.begin];
    const auto count = static_cast<int64_t>(even_.end - even_.begin);
    std::fill_n(y, count, 0.0f);
    for_each_position(g_, down, first, [&](int64_t position) {
      add_strided(x + position, even_.distance, count, y);
    });
    const float divisor = divisor_.of(down, first);
    for (int64_t i = 0; i < count; ++i) y[i] /= divisor;
  }

  static void add_strided(const float* __restrict values, int64_t stride,
                          int64_t count, float* __restrict y) {
    if (stride == 1) {
      for (int64_t i = 0; i < count; ++i) y[i] += values[i];
      return;
    }
    for (int64_t i = 0; i < count; ++i) y[i] += values[i * stride];
  }

  void spread(const float* grad_y, int64_t channels, float* grad_x) const {
    std::fill_n(grad_x, g_.input_size() * channels, 0.0f);
    for (const PoolWindow& down : g_.down) {
      const auto from = [&](size_t i) {
        return grad_y + static_cast<int64_t>(i) * channels;
      };
      for_each_window(
          channels,
          [&](size_t i) {
            spread_window(from(i), channels, down, g_.across[i], grad_x);
          },
          [&] { spread_even(from(even_.begin), down, grad_x); });
      grad_y = from(g_.across.size());
    }
  }

  void spread_window(const float* grad_y, int64_t channels,
                     const PoolWindow& down, const PoolWindow& across,
                     float* grad_x) const {
    const float divisor = divisor_.of(down, across);
    for_each_position(g_, down, across, [&](int64_t position) {
      float* __restrict out = grad_x + position * channels;
      for (int64_t c = 0; c < channels; ++c) out[c] += grad_y[c] / divisor;
    });
  }

  // Like spread_window for the even windows of a row, together. A number gets
  // its parts in the same order: from the windows from left to right, so from
  // their last positions first.
  void spread_even(const float* __restrict grad_y, const PoolWindow& down,
                   float* grad_x) const {
    const PoolWindow& first = g_.across[even_.begin];
    const auto count = static_cast<int64_t>(even_.end - even_.begin);
    const float divisor = divisor_.of(down, first);
    const int64_t step = g_.step_across;
    const int64_t steps = ceil_div(first.last - first.first, step);
    for (int64_t h = down.first; h < down.last; h += g_.step_down) {
      for (int64_t i = steps - 1; i >= 0; --i) {
        float* out = grad_x + h * g_.width + first.first + i * step;
        add_divided(grad_y, divisor, even_.distance, count, out);
      }
    }
  }

  static void add_divided(const float* __restrict from, float divisor,
                          int64_t stride, int64_t count,
                          float* __restrict out) {
    if (stride == 1) {
      for (int64_t i = 0; i < count; ++i) out[i] += from[i] / divisor;
      return;
    }
    for (int64_t i = 0; i < count; ++i) out[i * stride] += from[i] / divisor;
  }

  PoolGeometry g_;
  EvenWindows even_;  // of a row
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
