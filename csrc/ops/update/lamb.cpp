// LAMB: Adam's update, scaled for each parameter to the norm of the weight.
#include <utility>

#include "ops/op_def.h"
#include "ops/update/adam_common.h"
#include "ops/work.h"

namespace popsim::ops {
namespace {

using update::Scratch;

// u = mhat / (sqrt(vhat) + eps) + weight_decay * w;
// ratio = min(norm(w), max_weight_norm) / norm(u), or 1 if one of the three
// is 0; w -= learning_rate * ratio * u
class LambPart {
 public:
  explicit LambPart(const OpView& op)
      : operands_(op),
        max_weight_norm_(op, operands_.next_input()),
        term_(op, operands_.next_output()),
        weight_square_sum_(op, operands_.next_output() + 1),
        term_square_sum_(op, operands_.next_output() + 2),
        sums_(static_cast<size_t>(update::num_blocks(op.input(0).numel()))) {}

  void begin_step(const RunContext& context,
                  update::BiasCorrection& correction) {
    factors_ = operands_.begin_step(context, correction);
  }

  // Adds up the squares of w and u; changes no tensor.
  void sum_block(const RunContext& context, int64_t begin, int64_t size) {
    Block block(operands_, context, begin, size);
    Scratch new_m;
    Scratch new_v;
    Scratch term;
    const Factors factors = factors_;
    block.compute_term(factors, new_m.data(), new_v.data(), term.data());
    sums_[static_cast<size_t>(begin / update::kBlock)] = {
        update::sum_of_squares(block.w, size),
        update::sum_of_squares(term.data(), size)};
  }

  // Call it after sum_block() for all blocks.
  void scale_rate(const RunContext& context) {
    rate_ = factors_.learning_rate * trust_ratio(context);
  }

  void update_block(const RunContext& context, int64_t begin,
                    int64_t size) const {
    Block block(operands_, context, begin, size);
    Scratch scratch;
    float* term = term_.space(context, begin, scratch.data());
    const Factors factors = factors_;
    const float rate = rate_;
    block.compute_term(factors, block.m, block.v, term);
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) {
      block.w[i] = multiply_add(-rate, term[i], block.w[i]);
    }
    operands_.first.store(context, begin, size, block.m);
    operands_.second.store(context, begin, size, block.v);
    operands_.weight.store(context, begin, size, block.w);
  }

 private:
  using Factors = update::AdamOperands::Factors;
  struct Sums {
    double weight = 0.0;
    double term = 0.0;
  };

  // One block of all operands.
  struct Block {
    Block(const update::AdamOperands& operands, const RunContext& context,
          int64_t begin, int64_t size)
        : size(size),
          w(operands.weight.load(context, begin, size, scratch[0].data())),
          g(operands.gradient.read(context, begin, size, scratch[1].data())),
          m(operands.first.load(context, begin, size, scratch[2].data())),
          v(operands.second.load(context, begin, size, scratch[3].data())) {}

    // `term` becomes u.
    void compute_term(const Factors& factors, float* new_m, float* new_v,
                      float* term) const {
      update::AdamOperands::update_moments(factors, 0.0F, w, g, m, v, new_m,
                                           new_v, size);
      update::AdamOperands::update_term(factors, factors.weight_decay, w, new_m,
                                        new_v, term, size);
    }

    int64_t size;
    std::array<Scratch, 4> scratch;
    float* w;
    const float* g;
    float* m;
    float* v;
  };

  [[nodiscard]] float trust_ratio(const RunContext& context) const {
    Sums total;
    for (const Sums& block : sums_) {
      total.weight += block.weight;
      total.term += block.term;
    }
    for (const auto& [output, sum] :
         {std::pair{&weight_square_sum_, total.weight},
          std::pair{&term_square_sum_, total.term}}) {
      if (!output->is_wanted()) continue;
      *output->space(context, 0, nullptr) = static_cast<float>(sum);
    }
    const auto weight_norm = static_cast<float>(std::sqrt(total.weight));
    const auto term_norm = static_cast<float>(std::sqrt(total.term));
    const float limit = max_weight_norm_.read(context);
    if (weight_norm == 0.0F || term_norm == 0.0F || limit == 0.0F) return 1.0F;
    return (weight_norm < limit ? weight_norm : limit) / term_norm;
  }

  update::AdamOperands operands_;
  update::Scalar max_weight_norm_;
  update::Term term_;
  update::Term weight_square_sum_;
  update::Term term_square_sum_;
  std::vector<Sums> sums_;  // by block
  Factors factors_;
  float rate_ = 0.0F;
};

class LambUpdate final : public Kernel {
 public:
  explicit LambUpdate(const OpView& op) : parts_(op) {}

  void run(const RunContext& context) override {
    update::BiasCorrection correction;
    for (LambPart& part : parts_) part.begin_step(context, correction);
    parts_.for_each_block([&](LambPart& part, int64_t begin, int64_t size) {
      part.sum_block(context, begin, size);
    });
    for (LambPart& part : parts_) part.scale_rate(context);
    parts_.for_each_block(
        [&](const LambPart& part, int64_t begin, int64_t size) {
          part.update_block(context, begin, size);
        });
  }

 private:
  update::Parts<LambPart> parts_;
};

std::vector<TensorType> lamb_terms(const OpCall& part) {
  const TensorType sum{DType::kFloat32, {}};
  return {update::term_type(part), sum, sum};
}

}  // namespace

extern const OpDef kLambUpdate{
    .name = "lamb_update",
    .schema =
        "lamb_update[parameters](Tensor(a!){floats} weight, "
        "Tensor{floats} gradient, "
        "Tensor(b!){floats} first_moment, Tensor(c!){floats} second_moment, "
        "Tensor(d!){float32}[bias_correction] step, "
        "Tensor{float32} learning_rate, Tensor{float32} weight_decay, "
        "Tensor{float32} beta1, Tensor{float32} beta2, Tensor{float32} eps, "
        "Tensor{float32} gradient_scaling, "
        "Tensor{float32} max_weight_norm, *, bool bias_correction, "
        "int{1..} parameters=1, int{0..}? stream) -> "
        "(Tensor(a!) weight, Tensor(b!) first_moment, "
        "Tensor(c!) second_moment, Tensor(d!)[bias_correction] step, "
        "Tensor? term, Tensor? weight_square_sum, Tensor? term_square_sum)",
    .family = "update",
    .shape =
        update::updated_types<update::AdamOperands::num_states, lamb_terms>,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<LambUpdate>(op);
    },
    .work = update::updating<30>,
    .layer = true,
};

}  // namespace popsim::ops
