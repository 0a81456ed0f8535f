// Adam and AdamW.
#include "ops/op_def.h"
#include "ops/update/adam_common.h"
#include "ops/work.h"

namespace popsim::ops {
namespace {

using update::Scratch;

// g' = g + weight_decay * w (Adam) or g (AdamW); moments of g';
// w -= learning_rate * (mhat / (sqrt(vhat) + eps) [+ weight_decay * w, AdamW])
class AdamPart {
 public:
  explicit AdamPart(const OpView& op)
      : operands_(op),
        clip_(op, op.num_inputs() - 1),
        term_(op, operands_.next_output()),
        decoupled_(op.attribute<bool>("decoupled_weight_decay")) {}

  void begin_step(const RunContext& context,
                  update::BiasCorrection& correction) {
    factors_ = operands_.begin_step(context, correction);
    factors_.gradient_scale *= clip_.factor(context);
  }

  void update_block(const RunContext& context, int64_t begin,
                    int64_t size) const {
    Scratch weight;
    Scratch gradient;
    Scratch first;
    Scratch second;
    Scratch scratch;
    const update::AdamOperands::Factors factors = factors_;
    const float l2 = decoupled_ ? 0.0F : factors.weight_decay;
    const float decay = decoupled_ ? factors.weight_decay : 0.0F;
    float* w = operands_.weight.load(context, begin, size, weight.data());
    const float* g =
        operands_.gradient.read(context, begin, size, gradient.data());
    float* m = operands_.first.load(context, begin, size, first.data());
    float* v = operands_.second.load(context, begin, size, second.data());
    update::AdamOperands::update_moments(factors, l2, w, g, m, v, m, v, size);
    operands_.first.store(context, begin, size, m);
    operands_.second.store(context, begin, size, v);
    float* term = term_.space(context, begin, scratch.data());
    update::AdamOperands::update_term(factors, decay, w, m, v, term, size);
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) {
      w[i] = multiply_add(-factors.learning_rate, term[i], w[i]);
    }
    operands_.weight.store(context, begin, size, w);
  }

 private:
  update::AdamOperands operands_;
  update::Clip clip_;
  update::Term term_;
  bool decoupled_;
  update::AdamOperands::Factors factors_;
};

class AdamUpdate final : public Kernel {
 public:
  explicit AdamUpdate(const OpView& op) : parts_(op) {}

  void run(const RunContext& context) override {
    update::BiasCorrection correction;
    for (AdamPart& part : parts_) part.begin_step(context, correction);
    parts_.for_each_block(
        [&](const AdamPart& part, int64_t begin, int64_t size) {
          part.update_block(context, begin, size);
        });
  }

 private:
  update::Parts<AdamPart> parts_;
};

std::vector<TensorType> adam_terms(const OpCall& part) {
  return {update::term_type(part)};
}

}  // namespace

extern const OpDef kAdamUpdate{
    .name = "adam_update",
    .schema =
        "adam_update[parameters](Tensor(a!){floats} weight, "
        "Tensor{floats} gradient, "
        "Tensor(b!){floats} first_moment, Tensor(c!){floats} second_moment, "
        "Tensor(d!){float32}[bias_correction] step, "
        "Tensor{float32} learning_rate, Tensor{float32} weight_decay, "
        "Tensor{float32} beta1, Tensor{float32} beta2, Tensor{float32} eps, "
        "Tensor{float32} gradient_scaling, "
        "Tensor{float32}[max_grad_norm] norm, *, "
        "bool decoupled_weight_decay, bool bias_correction, "
        "float? max_grad_norm, int{1..} parameters=1, int{0..}? stream) -> "
        "(Tensor(a!) weight, Tensor(b!) first_moment, "
        "Tensor(c!) second_moment, Tensor(d!)[bias_correction] step, "
        "Tensor? term)",
    .family = "update",
    .shape =
        update::updated_types<update::AdamOperands::num_states, adam_terms>,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<AdamUpdate>(op);
    },
    .work = update::updating<15>,
    .layer = true,
};

}  // namespace popsim::ops
