// RMSprop: plain, centred, with momentum, and TensorFlow's variant.
#include <optional>

#include "ops/op_def.h"
#include "ops/update/parts.h"
#include "ops/work.h"

namespace popsim::ops {
namespace {

using update::Scratch;

// g' = g + weight_decay * w; a = alpha * a + (1 - alpha) * g'^2;
// centred: c = alpha * c + (1 - alpha) * g', s = a - c^2; else s = a;
// u = g' / (sqrt(s) + eps), TensorFlow: g' / sqrt(s + eps);
// momentum: b = momentum * b + u, u = b, TensorFlow: with learning_rate * u;
// w -= learning_rate * u, TensorFlow: w -= u
class RmspropPart {
 public:
  explicit RmspropPart(const OpView& op)
      : weight_(op, 0, 0, op.input(0).shape),
        gradient_(op, 1, op.input(0).shape),
        mean_square_(op, 2, 1, op.input(0).shape),
        tf_variant_(op.attribute<bool>("tf_variant")) {
    size_t next = 3;
    if (op.attribute<bool>("momentum")) {
      buffer_.emplace(op, next, next - 1, op.input(0).shape);
      ++next;
    }
    if (op.attribute<bool>("centered")) {
      mean_.emplace(op, next, next - 1, op.input(0).shape);
      ++next;
    }
    term_.emplace(op, next - 1);
    for (size_t i = 0; i < 6; ++i) scalars_.emplace_back(op, next + i);
  }

  [[nodiscard]] static size_t num_states(const OpCall& op) {
    return 1 + (op.attribute<bool>("momentum") ? 1 : 0) +
           (op.attribute<bool>("centered") ? 1 : 0);
  }

  void begin_step(const RunContext& context) {
    factors_ = {.learning_rate = scalars_[0].read(context),
                .weight_decay = scalars_[1].read(context),
                .alpha = scalars_[2].read(context),
                .momentum = scalars_[3].read(context),
                .eps = scalars_[4].read(context),
                .gradient_scale = 1.0F / scalars_[5].read(context)};
  }

  void update_block(const RunContext& context, int64_t begin,
                    int64_t size) const {
    const Factors factors = factors_;
    Scratch weight;
    Scratch grad;
    Scratch step;
    float* w = weight_.load(context, begin, size, weight.data());
    const float* g = gradient_.read(context, begin, size, grad.data());
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) {
      grad[i] = multiply_add(factors.weight_decay, w[i],
                             factors.gradient_scale * g[i]);
    }
    mean_squares(context, factors, grad.data(), begin, size, step.data());
    const float scale = tf_variant_ ? factors.learning_rate : 1.0F;
    const float rate = tf_variant_ ? 1.0F : factors.learning_rate;
    const float eps_inside = tf_variant_ ? factors.eps : 0.0F;
    const float eps_outside = tf_variant_ ? 0.0F : factors.eps;
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) step[i] += eps_inside;
    update::square_roots(step.data(), size);
    if (term_->is_wanted()) {
      float* term = term_->space(context, begin, nullptr);
#pragma omp simd
      for (int64_t i = 0; i < size; ++i) {
        term[i] = ratio(grad[i], step[i] + eps_outside);
      }
    }
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) {
      step[i] = scale * ratio(grad[i], step[i] + eps_outside);
    }
    if (buffer_) add_momentum(context, factors, begin, size, step.data());
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) {
      w[i] = multiply_add(-rate, step[i], w[i]);
    }
    weight_.store(context, begin, size, w);
  }

 private:
  struct Factors {
    float learning_rate;
    float weight_decay;
    float alpha;
    float momentum;
    float eps;
    float gradient_scale;  // multiplied with it, the gradient is the true one
  };

  // Computes u; `root` is the root of s plus eps, or TensorFlow's form of it.
  static float ratio(float grad, float root) { return grad / root; }

  // Updates a and c; `square` becomes s.
  void mean_squares(const RunContext& context, const Factors& factors,
                    const float* grad, int64_t begin, int64_t size,
                    float* square) const {
    const float alpha = factors.alpha;
    Scratch scratch;
    float* a = mean_square_.load(context, begin, size, scratch.data());
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) {
      a[i] = multiply_add(alpha, a[i], (1.0F - alpha) * grad[i] * grad[i]);
    }
    mean_square_.store(context, begin, size, a);
    std::copy_n(a, size, square);
    if (!mean_) return;
    float* c = mean_->load(context, begin, size, scratch.data());
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) {
      c[i] = multiply_add(alpha, c[i], (1.0F - alpha) * grad[i]);
    }
    mean_->store(context, begin, size, c);
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) {
      // Rounding can make the variance negative.
      const float variance = multiply_add(-c[i], c[i], square[i]);
      square[i] = variance < 0.0F ? 0.0F : variance;
    }
  }

  // b = momentum * b + step; `step` becomes b.
  void add_momentum(const RunContext& context, const Factors& factors,
                    int64_t begin, int64_t size, float* step) const {
    Scratch scratch;
    float* b = buffer_->load(context, begin, size, scratch.data());
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) {
      b[i] = multiply_add(factors.momentum, b[i], step[i]);
    }
    buffer_->store(context, begin, size, b);
    std::copy_n(b, size, step);
  }

  update::Target weight_;
  update::Source gradient_;
  update::Target mean_square_;
  std::optional<update::Target> buffer_;
  std::optional<update::Target> mean_;
  std::optional<update::Term> term_;
  std::vector<update::Scalar> scalars_;
  bool tf_variant_;
  Factors factors_{};
};

std::vector<TensorType> rmsprop_terms(const OpCall& part) {
  return {update::term_type(part)};
}

}  // namespace

extern const OpDef kRmspropUpdate{
    .name = "rmsprop_update",
    .schema =
        "rmsprop_update[parameters](Tensor(a!){floats} weight, "
        "Tensor{floats} gradient, Tensor(b!){floats} mean_square, "
        "Tensor(c!){floats}[momentum] momentum_buffer, "
        "Tensor(d!){floats}[centered] mean, Tensor{float32} learning_rate, "
        "Tensor{float32} weight_decay, Tensor{float32} alpha, "
        "Tensor{float32} momentum_factor, Tensor{float32} eps, "
        "Tensor{float32} gradient_scaling, *, bool momentum, bool centered, "
        "bool tf_variant, int{1..} parameters=1, int{0..}? stream) -> "
        "(Tensor(a!) weight, "
        "Tensor(b!) mean_square, Tensor(c!)[momentum] momentum_buffer, "
        "Tensor(d!)[centered] mean, Tensor? term)",
    .family = "update",
    .shape = update::updated_types<RmspropPart::num_states, rmsprop_terms>,
    .prepare = update::prepare_blockwise<RmspropPart>,
    .work = update::updating<15>,
    .layer = true,
};

}  // namespace popsim::ops
