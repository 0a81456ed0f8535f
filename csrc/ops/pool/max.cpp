// Max pooling and its gradient.
//
// Positions are numbered within the plane of the input image, as in PyTorch.
// The first maximum is chosen, and NaN is larger than every number.
#include <algorithm>
#include <limits>

#include "ops/op_def.h"
#include "ops/operands/float_operand.h"
#include "ops/operands/image_layout.h"
#include "ops/pool/windows.h"
#include "ops/work.h"

namespace popsim::ops {
namespace {

template <typename Index>
class MaxPool final : public Kernel {
 public:
  explicit MaxPool(const OpView& op)
      : g_(read_pool(op, op.input(0).shape)),
        last_(pool_channels_last(op, {})),
        x_(pool_input(op, 0, last_, workspace_)),
        y_(op.output_id(0), op.output(0), workspace_),
        indices_(op.output_id(1)) {
    check_pool_layouts(op, {}, last_);
  }

  void run(const RunContext& context) override {
    char* workspace = workspace_.memory();
    const float* x = x_.load(context, workspace);
    float* y = y_.buffer(context, workspace);
    auto* indices = context.data<Index>(indices_);
    const int64_t in = g_.input_size();
    const int64_t out = g_.output_size();
    // A unit of work is an image if the channels are last, otherwise a channel.
    const int64_t size = last_ ? g_.channels : 1;
    const int64_t count = last_ ? g_.batch : g_.batch * g_.channels;
    const threads::Shares shares(
        threads::additions(count * (in + 4 * out) * size), count);
    shares.run([&](int64_t /*share*/, threads::Range images) {
      for (int64_t i = images.begin; i < images.end; ++i) {
        pool(x + i * in * size, y + i * out * size, indices + i * out * size);
      }
    });
    y_.store(context, workspace);
  }

 private:
  void pool(const float* x, float* y, Index* indices) const {
    for (const PoolWindow& down : g_.down) {
      for (const PoolWindow& across : g_.across) {
        if (last_) {
          pool_channels(x, down, across, y, indices);
          y += g_.channels;
          indices += g_.channels;
        } else {
          pool_one(x, down, across, *y++, *indices++);
        }
      }
    }
  }

  void pool_one(const float* x, const PoolWindow& down,
                const PoolWindow& across, float& y, Index& index) const {
    y = -std::numeric_limits<float>::infinity();
    index = static_cast<Index>(down.first * g_.width + across.first);
    for_each_position(g_, down, across, [&](int64_t position) {
      const float value = x[position];
      if (value > y || value != value) {
        y = value;
        index = static_cast<Index>(position);
      }
    });
  }

  void pool_channels(const float* x, const PoolWindow& down,
                     const PoolWindow& across, float* __restrict y,
                     Index* __restrict indices) const {
    const int64_t channels = g_.channels;
    std::fill_n(y, channels, -std::numeric_limits<float>::infinity());
    std::fill_n(indices, channels,
                static_cast<Index>(down.first * g_.width + across.first));
    for_each_position(g_, down, across, [&](int64_t position) {
      const float* __restrict values = x + position * channels;
      const auto index = static_cast<Index>(position);
      for (int64_t c = 0; c < channels; ++c) {
        const bool takes = (values[c] > y[c]) | (values[c] != values[c]);
        y[c] = takes ? values[c] : y[c];
        indices[c] = takes ? index : indices[c];
      }
    });
  }

  PoolGeometry g_;
  bool last_;
  Workspace workspace_;
  FloatInput x_;
  FloatOutput y_;
  graph::TensorId indices_;
};

template <typename Index>
class MaxPoolGradient final : public Kernel {
 public:
  explicit MaxPoolGradient(const OpView& op)
      : g_(read_pool(op, op.output(0).shape)),
        last_(pool_channels_last(op, {1})),
        disjoint_(g_.disjoint()),
        grad_y_(pool_input(op, 0, last_, workspace_)),
        indices_(op.input_id(1)),
        grad_x_(op.output_id(0), op.output(0), workspace_) {
    check_pool_layouts(op, {1}, last_);
  }

  void run(const RunContext& context) override {
    char* workspace = workspace_.memory();
    const float* grad_y = grad_y_.load(context, workspace);
    const auto* indices = context.data<Index>(indices_);
    float* grad_x = grad_x_.buffer(context, workspace);
    const int64_t in = g_.input_size();
    const int64_t out = g_.output_size();
    const int64_t size = last_ ? g_.channels : 1;
    const int64_t count = last_ ? g_.batch : g_.batch * g_.channels;
    const threads::Shares shares(
        threads::additions(count * (in + 4 * out) * size), count);
    shares.run([&](int64_t /*share*/, threads::Range images) {
      for (int64_t i = images.begin; i < images.end; ++i) {
        spread(grad_y + i * out * size, indices + i * out * size,
               grad_x + i * in * size);
      }
    });
    grad_x_.store(context, workspace);
  }

 private:
  void spread(const float* grad_y, const Index* indices, float* grad_x) const {
    if (!last_) {
      std::fill_n(grad_x, g_.input_size(), 0.0f);
      for (int64_t i = 0; i < g_.output_size(); ++i) {
        // A window that lies completely in the padding has no position.
        if (indices[i] >= 0 && indices[i] < g_.input_size()) {
          grad_x[indices[i]] += grad_y[i];
        }
      }
      return;
    }
    if (!disjoint_ || !covers_all()) {
      std::fill_n(grad_x, g_.input_size() * g_.channels, 0.0f);
    }
    for (const PoolWindow& down : g_.down) {
      for (const PoolWindow& across : g_.across) {
        spread_channels(grad_y, indices, down, across, grad_x);
        grad_y += g_.channels;
        indices += g_.channels;
      }
    }
  }

  // Writes every position of a window, without gather or scatter.
  void spread_channels(const float* __restrict grad_y,
                       const Index* __restrict indices, const PoolWindow& down,
                       const PoolWindow& across, float* grad_x) const {
    const int64_t channels = g_.channels;
    for_each_position(g_, down, across, [&](int64_t position) {
      float* __restrict out = grad_x + position * channels;
      const auto index = static_cast<Index>(position);
      if (disjoint_) {
        for (int64_t c = 0; c < channels; ++c) {
          out[c] = indices[c] == index ? grad_y[c] : 0.0f;
        }
      } else {
        for (int64_t c = 0; c < channels; ++c) {
          out[c] += indices[c] == index ? grad_y[c] : 0.0f;
        }
      }
    });
  }

  [[nodiscard]] bool covers_all() const {
    int64_t covered = 0;
    for (const PoolWindow& down : g_.down) {
      for (const PoolWindow& across : g_.across) {
        covered +=
            ((down.last - down.first + g_.step_down - 1) / g_.step_down) *
            ((across.last - across.first + g_.step_across - 1) /
             g_.step_across);
      }
    }
    return covered == g_.input_size();
  }

  PoolGeometry g_;
  bool last_;
  bool disjoint_;
  Workspace workspace_;
  FloatInput grad_y_;
  graph::TensorId indices_;
  FloatOutput grad_x_;
};

template <template <typename> typename PoolKernel>
std::unique_ptr<Kernel> prepare(const OpView& op,
                                const graph::Tensor& indices) {
  if (indices.dtype == DType::kInt32) {
    return std::make_unique<PoolKernel<int32_t>>(op);
  }
  return std::make_unique<PoolKernel<int64_t>>(op);
}

std::vector<TensorType> pooled_types(const OpCall& op) {
  const Shape& x = op.input(0).shape;
  const Shape y = pooled_shape(op, x);
  const DType indices = dtype_from_name(op.attribute<std::string>("indices"));
  op.require(indices == DType::kInt64 ||
                 x[2] * x[3] <= std::numeric_limits<int32_t>::max(),
             "positions fit into 32 bits");
  return {{op.input(0).dtype, y}, {indices, y}};
}

std::vector<TensorType> unpooled_types(const OpCall& op) {
  const Shape& x = op.attribute<std::vector<int64_t>>("input_shape");
  const Shape y = pooled_shape(op, x);
  op.require_shape(0, y);
  op.require_shape(1, y);
  return {{op.input(0).dtype, x}};
}

}  // namespace

extern const OpDef kMaxPool{
    .name = "max_pool",
    .schema =
        "max_pool(Tensor{floats} x, *, int{1..}[2] kernel, "
        "int{1..}[2] stride, int{0..}[2] padding, int{1..}[2] dilation, "
        "bool ceil, dtype{indices} indices) -> (Tensor y, Tensor indices)",
    .family = "pool",
    .shape = pooled_types,
    .prepare =
        [](const OpView& op) { return prepare<MaxPool>(op, op.output(1)); },
    .work = pool_work,
    .outputs = OutputLayout::kImage,
    .layer = true,
    .exact = true,
};

extern const OpDef kMaxPoolGrad{
    .name = "max_pool_grad",
    .schema =
        "max_pool_grad(Tensor{floats} grad_y, Tensor{indices} indices, *, "
        "int{1..}[4] input_shape, int{1..}[2] kernel, int{1..}[2] stride, "
        "int{0..}[2] padding, int{1..}[2] dilation, bool ceil) -> Tensor",
    .family = "pool",
    .shape = unpooled_types,
    .prepare =
        [](const OpView& op) {
          return prepare<MaxPoolGradient>(op, op.input(1));
        },
    .work = pool_grad_work,
    .outputs = OutputLayout::kImage,
    .layer = true,
};

}  // namespace popsim::ops
