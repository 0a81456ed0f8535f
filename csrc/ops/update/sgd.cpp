// SGD without a velocity, and with a velocity and a separate accumulator.
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <optional>

#include "ops/op_def.h"
#include "ops/update/nesterov.h"
#include "ops/update/parts.h"
#include "ops/work.h"

namespace popsim::ops {
namespace {

using update::Scratch;
using Vec = at::vec::Vectorized<float>;

// Rounds in the same way as a product that includes the update
// (dense/matmul.h).
void step(float decay, float rate, const float* g, float* w, int64_t size) {
  for (int64_t i = 0; i < size; i += Vec::size()) {
    const auto count =
        static_cast<int>(std::min<int64_t>(Vec::size(), size - i));
    const auto load = [count](const float* from) {
      return count == Vec::size() ? Vec::loadu(from) : Vec::loadu(from, count);
    };
    at::vec::fmadd(Vec(-rate), load(g + i), Vec(decay) * load(w + i))
        .store(w + i, count);
  }
}

// w = decay * w - learning_rate * g
class SgdUpdate final : public Kernel {
 public:
  explicit SgdUpdate(const OpView& op)
      : weight_(op, 0, 0, op.input(0).shape),
        gradient_(op, 1, op.input(0).shape),
        decay_(op, 2),
        learning_rate_(op, 3),
        clip_(op, 4),
        numel_(op.input(0).numel()) {}

  void run(const RunContext& context) override {
    const float decay = decay_.read(context);
    const float rate = learning_rate_.read(context) * clip_.factor(context);
    update::for_each_block(numel_, [&](int64_t begin, int64_t size) {
      Scratch weight_scratch;
      Scratch gradient_scratch;
      float* w = weight_.load(context, begin, size, weight_scratch.data());
      const float* g =
          gradient_.read(context, begin, size, gradient_scratch.data());
      step(decay, rate, g, w, size);
      weight_.store(context, begin, size, w);
    });
  }

 private:
  update::Target weight_;
  update::Source gradient_;
  update::Scalar decay_;
  update::Scalar learning_rate_;
  update::Clip clip_;
  int64_t numel_;
};

// v = momentum * v + dampening * g + decay * w; then
//   w -= learning_rate * v, or, with Nesterov momentum,
//   w -= learning_rate * (nesterov_gradient * (nesterov_dampening * g +
//        nesterov_decay * w) + nesterov_momentum * v)
class SgdMomentumPart {
 public:
  explicit SgdMomentumPart(const OpView& op)
      : weight_(op, 0, 0, op.input(0).shape),
        gradient_(op, 1, op.input(0).shape),
        velocity_(op, 2, 1, op.input(0).shape),
        clip_(op, op.num_inputs() - 1) {
    for (size_t i = 0; i < 4; ++i) scalars_.emplace_back(op, 3 + i);
    if (op.attribute<bool>("nesterov")) nesterov_.emplace(op, 7, 2);
  }

  void begin_step(const RunContext& context) {
    const float clip = clip_.factor(context);
    factors_.momentum = scalars_[0].read(context);
    factors_.dampening = scalars_[1].read(context) * clip;
    factors_.decay = scalars_[2].read(context);
    factors_.rate = scalars_[3].read(context);
    if (nesterov_) factors_.nesterov = nesterov_->begin_step(context, clip);
  }

  void update_block(const RunContext& context, int64_t begin,
                    int64_t size) const {
    Scratch weight_scratch;
    Scratch gradient_scratch;
    Scratch velocity_scratch;
    const Factors f = factors_;
    float* w = weight_.load(context, begin, size, weight_scratch.data());
    const float* g =
        gradient_.read(context, begin, size, gradient_scratch.data());
    float* v = velocity_.load(context, begin, size, velocity_scratch.data());
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) {
      const float before = multiply_add(f.decay, w[i], f.momentum * v[i]);
      v[i] = multiply_add(f.dampening, g[i], before);
    }
    velocity_.store(context, begin, size, v);
    if (nesterov_) {
      nesterov_->write_terms(context, begin, size, f.nesterov, w, g,
                             [v](int64_t i) { return v[i]; });
#pragma omp simd
      for (int64_t i = 0; i < size; ++i) {
        w[i] = multiply_add(-f.rate, f.nesterov.step(w[i], g[i], v[i]), w[i]);
      }
    } else {
#pragma omp simd
      for (int64_t i = 0; i < size; ++i) {
        w[i] = multiply_add(-f.rate, v[i], w[i]);
      }
    }
    weight_.store(context, begin, size, w);
  }

 private:
  struct Factors {
    float momentum;
    float dampening;
    float decay;
    float rate;
    update::Nesterov::Factors nesterov;
  };

  update::Target weight_;
  update::Source gradient_;
  update::Target velocity_;
  std::vector<update::Scalar> scalars_;
  update::Clip clip_;
  std::optional<update::Nesterov> nesterov_;
  Factors factors_{};
};

std::vector<TensorType> momentum_terms(const OpCall& part) {
  if (!part.attribute<bool>("nesterov")) return {};
  return {update::term_type(part), update::term_type(part)};
}

}  // namespace

extern const OpDef kSgdUpdate{
    .name = "sgd_update",
    .schema =
        "sgd_update(Tensor(a!){floats} weight, Tensor{floats} gradient, "
        "Tensor{float32} weight_decay_scale_factor0, "
        "Tensor{float32} scaled_learning_rate0, "
        "Tensor{float32}[max_grad_norm] norm, *, float? max_grad_norm, "
        "int{0..}? stream) -> "
        "Tensor(a!) weight",
    .family = "update",
    .shape = update::updated_types<update::num_states<0>>,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<SgdUpdate>(op);
    },
    .work = elementwise<2>,
    .layer = true,
    .only_overflows = true,
};

extern const OpDef kSgdMomentumUpdate{
    .name = "sgd_momentum_update",
    .schema =
        "sgd_momentum_update[parameters](Tensor(a!){floats} weight, "
        "Tensor{floats} gradient, Tensor(b!){floats} velocity, "
        "Tensor{float32} scaled_momentum2, "
        "Tensor{float32} dampening_scale_factor2, "
        "Tensor{float32} scaled_weight_decay1, "
        "Tensor{float32} scaled_learning_rate2, "
        "Tensor{float32}[nesterov] nesterov_grad_scale_factor2, "
        "Tensor{float32}[nesterov] nesterov_dampening_scale_factor2, "
        "Tensor{float32}[nesterov] sgd_momentum, "
        "Tensor{float32}[nesterov] sgd_weight_decay, "
        "Tensor{float32}[max_grad_norm] norm, *, bool nesterov, "
        "float? max_grad_norm, int{1..} parameters=1, int{0..}? stream) -> "
        "(Tensor(a!) weight, Tensor(b!) velocity, "
        "Tensor? unscaled_gradient, Tensor? nesterov_gradient)",
    .family = "update",
    .shape = update::updated_types<update::num_states<1>, momentum_terms>,
    .prepare = update::prepare_blockwise<SgdMomentumPart>,
    .work = update::updating<6>,
    .layer = true,
};

}  // namespace popsim::ops
