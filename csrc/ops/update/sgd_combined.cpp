// SGD whose velocity is also the accumulator of the gradients.
//
// The stored velocity already contains momentum * v + decay * w when the first
// gradient of a device iteration is added to it.
#include <optional>

#include "ops/op_def.h"
#include "ops/update/nesterov.h"
#include "ops/update/parts.h"
#include "ops/work.h"

namespace popsim::ops {
namespace {

using update::Scratch;

// v = v + dampening * g
class SgdCombinedAccumulate final : public Kernel {
 public:
  explicit SgdCombinedAccumulate(const OpView& op)
      : gradient_(op, 0, op.input(1).shape),
        velocity_(op, 1, 0, op.input(1).shape),
        dampening_(op, 2),
        numel_(op.input(1).numel()) {}

  void run(const RunContext& context) override {
    const float dampening = dampening_.read(context);
    update::for_each_block(numel_, [&](int64_t begin, int64_t size) {
      Scratch gradient_scratch;
      Scratch velocity_scratch;
      const float* g =
          gradient_.read(context, begin, size, gradient_scratch.data());
      float* v = velocity_.load(context, begin, size, velocity_scratch.data());
#pragma omp simd
      for (int64_t i = 0; i < size; ++i) {
        v[i] = update::with_gradient(v[i], dampening, g[i]);
      }
      velocity_.store(context, begin, size, v);
    });
  }

 private:
  update::Source gradient_;
  update::Target velocity_;
  update::Scalar dampening_;
  int64_t numel_;
};

// With a gradient (the sum over the micro-batches, when it is needed whole: for
// clipping and Nesterov momentum), first v = v + dampening * g.
// Then w -= learning_rate * v, or, with Nesterov momentum,
//   w -= learning_rate * (nesterov_gradient * (nesterov_dampening * g +
//        nesterov_decay * w) + nesterov_momentum * v);
// and v = momentum * v + decay * w with the new w.
class SgdCombinedPart {
 public:
  explicit SgdCombinedPart(const OpView& op)
      : weight_(op, 0, 0, op.input(0).shape),
        velocity_(op, 2, 1, op.input(0).shape),
        clip_(op, op.num_inputs() - 1),
        velocity_into_update_(op, 2) {
    if (op.has_input(1)) {
      gradient_.emplace(op, 1, op.input(0).shape);
    }
    const bool nesterov = op.attribute<bool>("nesterov");
    const bool clipped = op.has_attribute("max_grad_norm");
    check_internal(gradient_ || (!nesterov && !clipped),
                   "sgd_combined_update '", op.op().name,
                   "': clipping and Nesterov momentum need the gradient");
    const size_t num_scalars = gradient_ ? 4 : 3;
    for (size_t i = 0; i < num_scalars; ++i) scalars_.emplace_back(op, 3 + i);
    if (nesterov) nesterov_.emplace(op, 7, 3);
  }

  void begin_step(const RunContext& context) {
    factors_ = read_factors(context);
  }

  void update_block(const RunContext& context, int64_t begin,
                    int64_t size) const {
    Scratch weight_scratch;
    Scratch gradient_scratch;
    Scratch velocity_scratch;
    const Factors factors = factors_;
    float* w = weight_.load(context, begin, size, weight_scratch.data());
    float* v = velocity_.load(context, begin, size, velocity_scratch.data());
    if (gradient_) {
      const float* g =
          gradient_->read(context, begin, size, gradient_scratch.data());
      add_gradient(context, factors, begin, size, w, g, v);
    }
    if (velocity_into_update_.is_wanted()) {
      std::copy_n(v, size,
                  velocity_into_update_.space(context, begin, nullptr));
    }
    if (!nesterov_) {
#pragma omp simd
      for (int64_t i = 0; i < size; ++i) {
        w[i] = multiply_add(-factors.rate, v[i], w[i]);
      }
    }
    weight_.store(context, begin, size, w);
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) {
      v[i] = multiply_add(factors.decay, w[i], factors.momentum * v[i]);
    }
    velocity_.store(context, begin, size, v);
  }

 private:
  struct Factors {
    float momentum = 0.0F;
    float decay = 0.0F;
    float rate = 0.0F;
    float dampening = 0.0F;
    update::Nesterov::Factors nesterov;
  };

  // Adds the gradient to v; with Nesterov momentum, also updates w.
  void add_gradient(const RunContext& context, const Factors& factors,
                    int64_t begin, int64_t size, float* w, const float* g,
                    float* v) const {
    const Factors f = factors;
    if (!nesterov_) {
#pragma omp simd
      for (int64_t i = 0; i < size; ++i) {
        v[i] = update::with_gradient(v[i], f.dampening, g[i]);
      }
      return;
    }
    nesterov_->write_terms(
        context, begin, size, f.nesterov, w, g, [&](int64_t i) {
          return update::with_gradient(v[i], f.dampening, g[i]);
        });
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) {
      v[i] = update::with_gradient(v[i], f.dampening, g[i]);
      w[i] = multiply_add(-f.rate, f.nesterov.step(w[i], g[i], v[i]), w[i]);
    }
  }

  [[nodiscard]] Factors read_factors(const RunContext& context) const {
    Factors factors{.momentum = scalars_[0].read(context),
                    .decay = scalars_[1].read(context),
                    .rate = scalars_[2].read(context)};
    if (!gradient_) return factors;
    const float clip = clip_.factor(context);
    factors.dampening = scalars_[3].read(context) * clip;
    if (nesterov_) factors.nesterov = nesterov_->begin_step(context, clip);
    return factors;
  }

  update::Target weight_;
  std::optional<update::Source> gradient_;
  update::Target velocity_;
  std::vector<update::Scalar> scalars_;
  update::Clip clip_;
  std::optional<update::Nesterov> nesterov_;
  update::Term velocity_into_update_;
  Factors factors_;
};

std::vector<TensorType> combined_terms(const OpCall& part) {
  const size_t count = part.attribute<bool>("nesterov") ? 3 : 1;
  return std::vector<TensorType>(count, update::term_type(part));
}

}  // namespace

extern const OpDef kSgdCombinedAccumulate{
    .name = "sgd_combined_accumulate",
    .schema =
        "sgd_combined_accumulate(Tensor{floats} gradient, "
        "Tensor(a!){floats} velocity, "
        "Tensor{float32} dampening_scale_factor1, *, int{0..}? stream) "
        "-> Tensor(a!) velocity",
    .family = "update",
    .shape = update::accumulated_type,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<SgdCombinedAccumulate>(op);
    },
    .work = elementwise<2>,
    .layer = true,
};

extern const OpDef kSgdCombinedUpdate{
    .name = "sgd_combined_update",
    .schema =
        "sgd_combined_update[parameters](Tensor(a!){floats} weight, "
        "Tensor{floats}? gradient, Tensor(b!){floats} velocity, "
        "Tensor{float32} scaled_momentum1, "
        "Tensor{float32} scaled_weight_decay1, "
        "Tensor{float32} scaled_learning_rate1, "
        "Tensor{float32}[gradient] dampening_scale_factor1, "
        "Tensor{float32}[nesterov] nesterov_grad_scale_factor1, "
        "Tensor{float32}[nesterov] nesterov_dampening_scale_factor1, "
        "Tensor{float32}[nesterov] sgd_momentum, "
        "Tensor{float32}[nesterov] sgd_weight_decay, "
        "Tensor{float32}[max_grad_norm] norm, *, bool nesterov, "
        "float? max_grad_norm, int{1..} parameters=1, int{0..}? stream) -> "
        "(Tensor(a!) weight, Tensor(b!) velocity, "
        "Tensor? velocity_into_update, Tensor? unscaled_gradient, "
        "Tensor? nesterov_gradient)",
    .family = "update",
    .shape = update::updated_types<update::num_states<1>, combined_terms>,
    .prepare = update::prepare_blockwise<SgdCombinedPart>,
    .work = update::updating<6>,
    .layer = true,
};

}  // namespace popsim::ops
