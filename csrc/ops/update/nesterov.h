// Nesterov momentum, for SGD with a separate velocity and with a combined one.
#pragma once

#include <vector>

#include "ops/update/common.h"

namespace popsim::ops::update {

// The weight's step, times the learning rate:
//   scale * (unscale * g + weight_decay * w) + momentum * v
class Nesterov {
 public:
  // The scalars [nesterov_grad_scale_factor, nesterov_dampening_scale_factor,
  // sgd_momentum, sgd_weight_decay] start at `input`, the terms [unscaled
  // gradient, step] at `output`.
  Nesterov(const OpView& op, size_t input, size_t output)
      : unscaled_(op, output), step_(op, output + 1) {
    for (size_t i = 0; i < 4; ++i) scalars_.emplace_back(op, input + i);
  }

  struct Factors {
    float scale = 0.0F;
    // The gradient multiplied by this is the true gradient, clipped.
    float unscale = 0.0F;
    float of_v = 0.0F;
    float of_w = 0.0F;

    [[nodiscard]] float gradient(float g) const { return unscale * g; }
    [[nodiscard]] float step(float w, float g, float v) const {
      return multiply_add(of_v, v, multiply_add(of_w, w, scale * gradient(g)));
    }
  };

  [[nodiscard]] Factors begin_step(const RunContext& context,
                                   float clip) const {
    const float scale = scalars_[0].read(context);
    return {.scale = scale,
            .unscale = scalars_[1].read(context) * clip,
            .of_v = scalars_[2].read(context),
            .of_w = scale * scalars_[3].read(context)};
  }

  // Writes the terms that are read; velocity(i) is the new velocity.
  template <typename Velocity>
  void write_terms(const RunContext& context, int64_t begin, int64_t size,
                   const Factors& factors, const float* w, const float* g,
                   const Velocity& velocity) const {
    const Factors f = factors;
    if (unscaled_.is_wanted()) {
      float* out = unscaled_.space(context, begin, nullptr);
#pragma omp simd
      for (int64_t i = 0; i < size; ++i) out[i] = f.gradient(g[i]);
    }
    if (step_.is_wanted()) {
      float* out = step_.space(context, begin, nullptr);
#pragma omp simd
      for (int64_t i = 0; i < size; ++i) {
        out[i] = f.step(w[i], g[i], velocity(i));
      }
    }
  }

 private:
  Term unscaled_;
  Term step_;
  std::vector<Scalar> scalars_;
};

}  // namespace popsim::ops::update
