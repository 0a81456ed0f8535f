// The first half of an update of the Adam family: moments and step count.
#pragma once

#include <limits>
#include <optional>

#include "ops/update/parts.h"

namespace popsim::ops::update {

// The factors that correct the bias of Adam's moments. Parameters mostly have
// the same step and betas, so the last result is kept.
class BiasCorrection {
 public:
  struct Scales {
    // mhat = first * m and sqrt(vhat) = second * sqrt(v)
    float first = 1.0F;
    float second = 1.0F;
  };

  [[nodiscard]] Scales at(float step, float beta1, float beta2) {
    if (step != step_ || beta1 != beta1_ || beta2 != beta2_) {
      step_ = step;
      beta1_ = beta1;
      beta2_ = beta2;
      const double first = 1.0 - std::pow(double{beta1}, double{step});
      const double second = 1.0 - std::pow(double{beta2}, double{step});
      scales_ = {static_cast<float>(1.0 / first),
                 static_cast<float>(1.0 / std::sqrt(second))};
    }
    return scales_;
  }

 private:
  float step_ = std::numeric_limits<float>::quiet_NaN();  // none yet
  float beta1_ = 0.0F;
  float beta2_ = 0.0F;
  Scales scales_;
};

// Inputs [weight, gradient, first moment, second moment, step?, learning_rate,
// weight_decay, beta1, beta2, eps, gradient_scaling, ...]; the step is given if
// the attribute "bias_correction" is true.
class AdamOperands {
 public:
  explicit AdamOperands(const OpView& op)
      : bias_correction_(op.attribute<bool>("bias_correction")),
        first_scalar_(bias_correction_ ? 5 : 4),
        weight(op, 0, 0, op.input(0).shape),
        gradient(op, 1, op.input(0).shape),
        first(op, 2, 1, op.input(0).shape),
        second(op, 3, 2, op.input(0).shape) {
    if (bias_correction_) {
      step_.emplace(op, 4);
      new_step_ = op.output_id(3);
    }
    for (size_t i = 0; i < 6; ++i) scalars_.emplace_back(op, first_scalar_ + i);
  }

  // Position of the first input after the scalars of this class.
  [[nodiscard]] size_t next_input() const { return first_scalar_ + 6; }
  // Position of the first output after the weight and the states.
  [[nodiscard]] size_t next_output() const { return bias_correction_ ? 4 : 3; }
  [[nodiscard]] static size_t num_states(const OpCall& op) {
    return op.attribute<bool>("bias_correction") ? 3 : 2;
  }

  struct Factors {
    float learning_rate = 0.0F;
    float weight_decay = 0.0F;
    float beta1 = 0.0F;
    float beta2 = 0.0F;
    float eps = 0.0F;
    // The gradient multiplied by this is the true gradient.
    float gradient_scale = 0.0F;
    BiasCorrection::Scales scales;
  };

  // Increases the step count, and reads the scalars.
  [[nodiscard]] Factors begin_step(const RunContext& context,
                                   BiasCorrection& correction) const {
    Factors factors{.learning_rate = scalars_[0].read(context),
                    .weight_decay = scalars_[1].read(context),
                    .beta1 = scalars_[2].read(context),
                    .beta2 = scalars_[3].read(context),
                    .eps = scalars_[4].read(context),
                    .gradient_scale = 1.0F / scalars_[5].read(context),
                    .scales = {}};
    if (bias_correction_) {
      const float step = step_->read(context) + 1.0F;
      context.data<float>(new_step_)[0] = step;
      factors.scales = correction.at(step, factors.beta1, factors.beta2);
    }
    return factors;
  }

  // new_m = beta1 * m + (1 - beta1) * g'; new_v = beta2 * v + (1 - beta2) *
  // g'^2, with g' = gradient_scale * g + decay * w. Old and new values may be
  // the same memory.
  static void update_moments(const Factors& factors, float decay,
                             const float* w, const float* g, const float* m,
                             const float* v, float* new_m, float* new_v,
                             int64_t size) {
    const float scale = factors.gradient_scale;
    const float beta1 = factors.beta1;
    const float beta2 = factors.beta2;
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) {
      const float grad = multiply_add(decay, w[i], scale * g[i]);
      new_m[i] = multiply_add(beta1, m[i], (1.0F - beta1) * grad);
      new_v[i] = multiply_add(beta2, v[i], (1.0F - beta2) * grad * grad);
    }
  }

  // term = mhat / (sqrt(vhat) + eps) + decay * w
  static void update_term(const Factors& factors, float decay, const float* w,
                          const float* m, const float* v, float* term,
                          int64_t size) {
    std::copy_n(v, size, term);
    square_roots(term, size);
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) {
      const float root =
          multiply_add(factors.scales.second, term[i], factors.eps);
      term[i] = multiply_add(decay, w[i], factors.scales.first * m[i] / root);
    }
  }

 private:
  bool bias_correction_;
  size_t first_scalar_;
  std::optional<Scalar> step_;
  graph::TensorId new_step_ = graph::kNoTensor;
  std::vector<Scalar> scalars_;

 public:
  Target weight;
  Source gradient;
  Target first;
  Target second;
};

}  // namespace popsim::ops::update
