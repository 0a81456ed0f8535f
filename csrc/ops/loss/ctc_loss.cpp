// Connectionist temporal classification (CTC) and its gradient: the loss of a
// sequence whose labels are known, but whose alignment with the steps is
// unknown.
//
// For each item the log-probabilities of the states are computed step by step:
// first given the steps so far (alpha), then given the later steps. At each
// step they are scaled so that the highest probability is 1, which keeps them
// precise over long sequences. The loss adds up the scales in float64; the
// gradient needs only the relative probabilities of the states.
#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "ops/loss/ctc_batch.h"
#include "ops/loss/ctc_states.h"
#include "ops/math/vec_math.h"
#include "ops/op_def.h"
#include "ops/operands/rows.h"
#include "ops/work.h"
#include "threads/tasks.h"

namespace popsim::ops {
namespace {

using ctc::Item;
using ctc::States;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// The cost of a state at each step, in elements that are read or written.
constexpr int64_t kStateElements = 16;

threads::Shares shares_of(const ctc::Batch& batch) {
  const int64_t elements =
      kStateElements * batch.columns() + 2 * batch.size() * batch.classes();
  return {threads::elements(batch.steps() * elements), batch.size()};
}

constexpr ctc::Inputs kLossInputs{
    .log_probs = 0, .labels = 1, .input_lengths = 2, .target_lengths = 3};

class CtcLoss final : public Kernel {
 public:
  explicit CtcLoss(const OpView& op)
      : batch_(op, kLossInputs),
        log_probs_(op, 0, batch_.classes()),
        zero_infinity_(op.attribute<bool>("zero_infinity")),
        shares_(shares_of(batch_)) {
    if (op.has_output(0)) loss_.emplace(op, 0, 1);
    if (op.has_output(1)) alpha_.emplace(op, 1, batch_.columns());
    const Scratch scratch{
        States(batch_.most_states(), op.attribute<int64_t>("blank")),
        std::vector<float>(static_cast<size_t>(padded(batch_.classes())))};
    scratch_.assign(static_cast<size_t>(shares_.limit()), scratch);
  }

  void run(const RunContext& context) override {
    batch_.read(context);
    shares_.run([&](int64_t share, threads::Range items) {
      Scratch& scratch = scratch_[static_cast<size_t>(share)];
      for (int64_t i = items.begin; i < items.end; ++i) {
        const float loss = run_item(context, i, scratch);
        if (loss_) loss_->write(context, i, 0, 1, &loss);
      }
    });
  }

 private:
  struct Scratch {
    States states;
    std::vector<float> log_probs;
  };

  float run_item(const RunContext& context, int64_t i, Scratch& scratch) const {
    const Item& item = batch_.item(i);
    States& states = scratch.states;
    states.begin(item);
    std::fill_n(states.values(), std::min<int64_t>(states.count(), 2), 0.0f);
    double factor = 0.0;
    for (int64_t step = 0; step < batch_.steps(); ++step) {
      if (step < item.steps) {
        if (step > 0) states.advance();
        states.emit(log_probs_.read(context, step * batch_.size() + i,
                                    scratch.log_probs.data()));
        factor += states.add_emissions();
      }
      if (alpha_) keep(context, step, item, states);
    }
    if (item.steps == 0) return loss(item.labels.empty() ? 0.0 : ctc::kNever);
    const double end = States::end(states.values(), states.count());
    return loss(end < ctc::kHardlyEver ? end : end + factor);
  }

  // Writes the values of a step that the gradient needs; zeros where there is
  // no state.
  void keep(const RunContext& context, int64_t step, const Item& item,
            const States& states) const {
    const int64_t count = step < item.steps ? states.count() : 0;
    float* alpha = alpha_->space(context, step, nullptr) + item.column;
    std::copy_n(states.values(), count, alpha);
    std::fill(alpha + count, alpha + item.columns, 0.0f);
  }

  [[nodiscard]] float loss(double log_probability) const {
    if (log_probability < ctc::kHardlyEver) {
      return zero_infinity_ ? 0.0f : kInfinity;
    }
    return static_cast<float>(-log_probability);
  }

  ctc::Batch batch_;
  RowInput log_probs_;
  bool zero_infinity_;
  std::optional<RowOutput> loss_;
  std::optional<RowOutput> alpha_;
  threads::Shares shares_;
  std::vector<Scratch> scratch_;  // by share
};

constexpr ctc::Inputs kGradInputs{
    .log_probs = 1, .labels = 2, .input_lengths = 3, .target_lengths = 4};

// The gradient with respect to the logits, whose log-softmax is the
// log-probabilities: the probability of each class at a step, minus its share
// of the alignments.
class CtcLossGrad final : public Kernel {
 public:
  explicit CtcLossGrad(const OpView& op)
      : batch_(op, kGradInputs),
        blank_(op.attribute<int64_t>("blank")),
        zero_infinity_(op.attribute<bool>("zero_infinity")),
        gradient_(op, 0, 1),
        log_probs_(op, 1, batch_.classes()),
        alpha_(op, 5, batch_.columns()),
        out_(op, 0, batch_.classes()),
        shares_(shares_of(batch_)) {
    const auto classes = static_cast<size_t>(padded(batch_.classes()));
    const auto states = static_cast<size_t>(padded(batch_.most_states()));
    const Scratch scratch{
        States(batch_.most_states(), blank_), std::vector<float>(classes),
        std::vector<float>(classes),          std::vector<float>(classes),
        std::vector<float>(states),           std::vector<float>(states)};
    scratch_.assign(static_cast<size_t>(shares_.limit()), scratch);
  }

  void run(const RunContext& context) override {
    batch_.read(context);
    shares_.run([&](int64_t share, threads::Range items) {
      Scratch& scratch = scratch_[static_cast<size_t>(share)];
      for (int64_t i = items.begin; i < items.end; ++i) {
        run_item(context, i, scratch);
      }
    });
  }

 private:
  struct Scratch {
    States states;
    std::vector<float> log_probs;
    std::vector<float> of_classes;
    std::vector<float> out;
    std::vector<float> alpha;
    std::vector<float> of_states;
  };

  void run_item(const RunContext& context, int64_t i, Scratch& scratch) const {
    const Item& item = batch_.item(i);
    fill(context, i, {item.steps, batch_.steps()}, 0.0f, scratch);
    if (item.steps == 0) return;
    const double end = States::end(
        alpha(context, item.steps - 1, item, scratch), item.states());
    if (!(end >= ctc::kHardlyEver)) {
      const bool zero = zero_infinity_ && !std::isnan(end);
      fill(context, i, {0, item.steps}, zero ? 0.0f : kNaN, scratch);
      return;
    }
    float gradient = 0.0f;
    gradient = *gradient_.read(context, i, &gradient);
    States& states = scratch.states;
    states.begin(item);
    const int64_t last = std::min<int64_t>(states.count(), 2);
    std::fill_n(states.values() + states.count() - last, last, 0.0f);
    for (int64_t step = item.steps - 1; step >= 0; --step) {
      if (step < item.steps - 1) states.go_back();
      share_out(alpha(context, step, item, scratch), item, scratch);
      const int64_t row = step * batch_.size() + i;
      const float* log_probs =
          log_probs_.read(context, row, scratch.log_probs.data());
      write(context, row, log_probs, gradient, scratch);
      states.emit(log_probs);
      states.add_emissions();
    }
  }

  [[nodiscard]] const float* alpha(const RunContext& context, int64_t step,
                                   const Item& item, Scratch& scratch) const {
    return alpha_.read(context, step, item.column, item.states(),
                       scratch.alpha.data());
  }

  // Fills of_classes: the probability of each class at a step, given the
  // labels.
  void share_out(const float* alpha, const Item& item, Scratch& scratch) const {
    const float* behind = scratch.states.values();
    float* of_states = scratch.of_states.data();
    const int64_t count = item.states();
    Vec highest(-kInfinity);
    for_each_vector(count, [&](int64_t s, auto n) {
      const Vec sum = load(alpha + s, n) + load(behind + s, n);
      store(sum, of_states + s, n);
      highest = larger(highest, keep(sum, Vec(-kInfinity), n));
    });
    const Vec top(max_across(highest));
    Vec sums(0.0f);
    for_each_vector(count, [&](int64_t s, auto n) {
      const Vec share = exp(load(of_states + s, n) - top);
      store(share, of_states + s, n);
      sums = sums + keep(share, Vec(0.0f), n);
    });
    const float factor = 1.0f / sum_across(sums);
    float* of_classes = scratch.of_classes.data();
    std::fill_n(of_classes, batch_.classes(), 0.0f);
    float blanks = of_states[0];
    for (size_t k = 0; k < item.labels.size(); ++k) {
      of_classes[item.labels[k]] += of_states[2 * k + 1] * factor;
      blanks += of_states[2 * k + 2];
    }
    of_classes[blank_] += blanks * factor;
  }

  void write(const RunContext& context, int64_t row, const float* log_probs,
             float gradient, Scratch& scratch) const {
    float* out = out_.space(context, row, scratch.out.data());
    const float* of_classes = scratch.of_classes.data();
    for_each_vector(batch_.classes(), [&](int64_t c, auto n) {
      const Vec x = load(log_probs + c, n);
      const Vec slope = (exp(x) - load(of_classes + c, n)) * Vec(gradient);
      // As in PyTorch, for a class that is impossible.
      store(Vec::blendv(slope, Vec(kNaN), x == Vec(-kInfinity)), out + c, n);
    });
    out_.store(context, row, out);
  }

  void fill(const RunContext& context, int64_t i, threads::Range steps,
            float value, Scratch& scratch) const {
    for (int64_t step = steps.begin; step < steps.end; ++step) {
      const int64_t row = step * batch_.size() + i;
      float* out = out_.space(context, row, scratch.out.data());
      std::fill_n(out, batch_.classes(), value);
      out_.store(context, row, out);
    }
  }

  ctc::Batch batch_;
  int64_t blank_;
  bool zero_infinity_;
  RowInput gradient_;
  RowInput log_probs_;
  RowInput alpha_;
  RowOutput out_;
  threads::Shares shares_;
  std::vector<Scratch> scratch_;  // by share
};

std::vector<TensorType> loss_types(const OpCall& op) {
  ctc::check_operands(op, kLossInputs);
  const Shape& x = op.input(0).shape;
  return {{op.input(0).dtype, {x[1]}},
          {DType::kFloat32, {x[0], ctc::num_columns(op, kLossInputs)}}};
}

std::vector<TensorType> gradient_type(const OpCall& op) {
  ctc::check_operands(op, kGradInputs);
  const Shape& x = op.input(1).shape;
  op.require_shape(0, {x[1]});
  op.require_shape(5, {x[0], ctc::num_columns(op, kGradInputs)});
  return {op.input_type(1)};
}

// Three exponentials and a logarithm for each state.
constexpr int64_t kStateCost = 60;

std::vector<graph::Work> loss_work(const OpView& op) {
  const int64_t states =
      op.input(0).shape[0] * ctc::num_columns(op, kLossInputs);
  return {graph::Elementwise{states, kStateCost}};
}

std::vector<graph::Work> gradient_work(const OpView& op) {
  const int64_t states =
      op.input(1).shape[0] * ctc::num_columns(op, kGradInputs);
  return {graph::Elementwise{states, kStateCost},
          graph::Elementwise{op.output(0).numel(), 14}};
}

}  // namespace

extern const OpDef kCtcLoss{
    .name = "ctc_loss",
    .schema =
        "ctc_loss(Tensor{floats} log_probs, Tensor{indices} targets, "
        "Tensor{indices} input_lengths, Tensor{indices} target_lengths, *, "
        "int{0..} blank, bool zero_infinity) -> (Tensor? loss, Tensor? alpha)",
    .family = "loss",
    .shape = loss_types,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<CtcLoss>(op);
    },
    .work = loss_work,
    .layer = true,
};

extern const OpDef kCtcLossGrad{
    .name = "ctc_loss_grad",
    .schema =
        "ctc_loss_grad(Tensor{floats} gradient, Tensor{floats} log_probs, "
        "Tensor{indices} targets, Tensor{indices} input_lengths, "
        "Tensor{indices} target_lengths, Tensor{float32} alpha, *, "
        "int{0..} blank, bool zero_infinity) -> Tensor",
    .family = "loss",
    .shape = gradient_type,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<CtcLossGrad>(op);
    },
    .work = gradient_work,
    .layer = true,
};

}  // namespace popsim::ops
