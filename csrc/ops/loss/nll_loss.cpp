// Negative log-likelihood of classes that are given as numbers, its gradient,
// and the gradient of log-softmax and this loss together.
#include <cmath>
#include <optional>

#include "ops/math/vec_math.h"
#include "ops/op_def.h"
#include "ops/operands/rows.h"
#include "ops/work.h"
#include "threads/tasks.h"

namespace popsim::ops {
namespace {

// The classes of a batch and their weights. Inputs of the op, starting at
// `first`: labels, then weights by class or nothing.
class Labels {
 public:
  Labels(const OpView& op, size_t first, int64_t num_classes)
      : labels_(op.input_id(first)),
        is_32_bit_(op.input(first).dtype == DType::kInt32),
        stride_(op.input(first).strides[0]),
        num_classes_(num_classes),
        ignored_(op.attribute<int64_t>("ignore_index")) {
    if (op.has_input(first + 1)) {
      weights_.emplace(op, first + 1, num_classes);
      weight_values_.resize(static_cast<size_t>(num_classes));
    }
  }

  // Call it once in each run, before the other functions.
  void read(const RunContext& context) {
    if (weights_) weight_ = weights_->read(context, 0, weight_values_.data());
  }

  // The class of a sample; empty if the sample is ignored.
  [[nodiscard]] std::optional<int64_t> label(const RunContext& context,
                                             int64_t sample) const {
    const int64_t at = sample * stride_;
    const int64_t label = is_32_bit_ ? context.data<const int32_t>(labels_)[at]
                                     : context.data<const int64_t>(labels_)[at];
    if (label == ignored_) return std::nullopt;
    check_user(label >= 0 && label < num_classes_, "Target ", label,
               " is out of bounds.");
    return label;
  }

  [[nodiscard]] float weight(int64_t label) const {
    return weights_ ? weight_[label] : 1.0f;
  }

 private:
  graph::TensorId labels_;
  bool is_32_bit_;
  int64_t stride_;
  int64_t num_classes_;
  int64_t ignored_;
  std::optional<RowInput> weights_;
  std::vector<float> weight_values_;
  const float* weight_ = nullptr;
};

class NllLoss final : public Kernel {
 public:
  explicit NllLoss(const OpView& op)
      : samples_(op.input(0).shape[0]),
        x_(op, 0, op.input(0).shape[1]),
        labels_(op, 1, op.input(0).shape[1]),
        reduction_(op.attribute<std::string>("reduction")) {
    if (op.has_output(0)) out_.emplace(op, 0, 1);
    if (op.has_output(1)) total_.emplace(op, 1, 1);
  }

  void run(const RunContext& context) override {
    labels_.read(context);
    const bool reduces = reduction_ != "none";
    double sum = 0.0;
    double total = 0.0;
    for (int64_t i = 0; i < samples_; ++i) {
      float loss = 0.0f;
      if (const auto label = labels_.label(context, i)) {
        const float weight = labels_.weight(*label);
        float x = 0.0f;
        loss = -*x_.read(context, i, *label, 1, &x) * weight;
        total += weight;
      }
      sum += loss;
      if (!reduces && out_) out_->write(context, i, 0, 1, &loss);
    }
    if (reduces && out_) {
      const auto loss =
          static_cast<float>(reduction_ == "mean" ? sum / total : sum);
      out_->write(context, 0, 0, 1, &loss);
    }
    const float weights = reduces ? static_cast<float>(total) : 0.0f;
    if (total_) total_->write(context, 0, 0, 1, &weights);
  }

 private:
  int64_t samples_;
  RowInput x_;
  Labels labels_;
  std::string reduction_;
  std::optional<RowOutput> out_;
  std::optional<RowOutput> total_;
};

// The gradient of the losses at the label of each sample.
class LabelGradient {
 public:
  // Inputs of the op, starting at `first`: the gradient of the loss, then the
  // total weight or nothing.
  LabelGradient(const OpView& op, size_t first)
      : gradient_(op, first, 1),
        per_sample_(op.attribute<std::string>("reduction") == "none"),
        load_(load_floats(op.output(0).dtype)),
        store_(store_floats(op.output(0).dtype)) {
    if (op.attribute<std::string>("reduction") == "mean") {
      total_.emplace(op, first + 1, 1);
    }
  }

  // Rounded to the dtype of the result, so the bits are the same whether or not
  // ops are fused.
  [[nodiscard]] float value(const RunContext& context, int64_t sample,
                            float weight) const {
    float scratch = 0.0f;
    const float gradient =
        *gradient_.read(context, per_sample_ ? sample : 0, &scratch);
    const float value = -weight * gradient;
    return rounded(total_ ? value / *total_->read(context, 0, &scratch)
                          : value);
  }

 private:
  [[nodiscard]] float rounded(float value) const {
    float element = 0.0f;  // large enough for every dtype here
    store_(&value, /*uniform=*/true, &element, 0, 1);
    load_(&element, 0, /*stride=*/1, 1, &value);
    return value;
  }

  RowInput gradient_;
  bool per_sample_;
  LoadFloats load_;
  StoreFloats store_;
  std::optional<RowInput> total_;
};

// Inputs: gradient, total weight, labels, weights.
class NllLossGrad final : public Kernel {
 public:
  explicit NllLossGrad(const OpView& op)
      : samples_(op.output(0).shape[0]),
        classes_(op.output(0).shape[1]),
        gradient_(op, 0),
        labels_(op, 2, classes_),
        out_(op, 0, classes_),
        scratch_(static_cast<size_t>(classes_)) {}

  void run(const RunContext& context) override {
    labels_.read(context);
    for (int64_t i = 0; i < samples_; ++i) {
      float* out = out_.space(context, i, scratch_.data());
      std::fill_n(out, classes_, 0.0f);
      if (const auto label = labels_.label(context, i)) {
        out[*label] = gradient_.value(context, i, labels_.weight(*label));
      }
      out_.store(context, i, out);
    }
  }

 private:
  int64_t samples_;
  int64_t classes_;
  LabelGradient gradient_;
  Labels labels_;
  RowOutput out_;
  std::vector<float> scratch_;
};

// Inputs: gradient, total weight, labels, weights, log-softmax.
class CrossEntropyGrad final : public Kernel {
 public:
  explicit CrossEntropyGrad(const OpView& op)
      : samples_(op.output(0).shape[0]),
        classes_(op.output(0).shape[1]),
        gradient_(op, 0),
        labels_(op, 2, classes_),
        log_softmax_(op, 4, classes_),
        out_(op, 0, classes_),
        shares_(threads::elements(2 * op.output(0).numel()), samples_),
        scratch_(static_cast<size_t>(shares_.limit())) {
    for (auto& share : scratch_) {
      share.resize(static_cast<size_t>(2 * padded(classes_)));
    }
  }

  void run(const RunContext& context) override {
    labels_.read(context);
    shares_.run([&](int64_t share, threads::Range rows) {
      float* scratch = scratch_[static_cast<size_t>(share)].data();
      for (int64_t row = rows.begin; row < rows.end; ++row) {
        run_row(context, row, scratch);
      }
    });
  }

 private:
  void run_row(const RunContext& context, int64_t row, float* scratch) const {
    float* out = out_.space(context, row, scratch);
    const auto label = labels_.label(context, row);
    const float* y =
        log_softmax_.read(context, row, scratch + padded(classes_));
    const float at_label =
        label ? gradient_.value(context, row, labels_.weight(*label)) : 0.0f;
    // The same computation as in softmax_grad, so the bits are the same.
    const Vec scale(-at_label);
    const auto grad = [&](const float* at, float g, auto n) {
      return at::vec::fmadd(exp(load(at, n)), scale, Vec(g));
    };
    for_each_vector(classes_, [&](int64_t i, auto n) {
      store(grad(y + i, 0.0f, n), out + i, n);
    });
    constexpr int64_t kOne = 1;
    if (label) store(grad(y + *label, at_label, kOne), out + *label, kOne);
    out_.store(context, row, out);
  }

  int64_t samples_;
  int64_t classes_;
  LabelGradient gradient_;
  Labels labels_;
  RowInput log_softmax_;
  RowOutput out_;
  threads::Shares shares_;
  std::vector<std::vector<float>> scratch_;  // by share
};

// Input `labels` has the labels, the next input the weights by class.
void check_labels(const OpCall& op, size_t labels, const Shape& samples,
                  int64_t classes) {
  op.require_shape(labels, samples);
  if (op.has_input(labels + 1)) op.require_shape(labels + 1, {classes});
}

std::vector<TensorType> nll_loss_types(const OpCall& op) {
  op.require_rank(0, 2);
  const TensorType x = op.input_type(0);
  const Shape samples{x.shape[0]};
  check_labels(op, 1, samples, x.shape[1]);
  const bool reduces = op.attribute<std::string>("reduction") != "none";
  return {{x.dtype, reduces ? Shape{} : samples}, {x.dtype, {}}};
}

std::vector<TensorType> nll_loss_grad_type(const OpCall& op) {
  const auto& reduction = op.attribute<std::string>("reduction");
  const int64_t classes = op.attribute<int64_t>("classes");
  op.require_rank(2, 1);
  const Shape samples = op.input(2).shape;
  check_labels(op, 2, samples, classes);
  op.require_shape(0, reduction == "none" ? samples : Shape{});
  op.require(op.has_input(1) || reduction != "mean", "a mean has a weight");
  if (op.has_input(1)) op.require_shape(1, {});
  const Shape shape{samples[0], classes};
  op.require(is_valid_shape(shape), "a tensor with ", classes,
             " classes has a valid shape");
  if (op.num_inputs() > 4) op.require_shape(4, shape);
  return {{dtype_from_name(op.attribute<std::string>("dtype")), shape}};
}

// Counts only the classes of the labels, which are all that is read.
std::vector<graph::Work> nll_loss_work(const OpView& op) {
  const int64_t samples = op.input(0).shape[0];
  return {graph::Reduce{samples},
          graph::Move{samples * size_in_bytes(op.input(0).dtype) +
                      op.input(1).bytes()}};
}

}  // namespace

extern const OpDef kNllLoss{
    .name = "nll_loss",
    .schema =
        "nll_loss(Tensor{floats} x, Tensor{indices} labels, "
        "Tensor{floats}? weights, *, str{none, mean, sum} reduction, "
        "int ignore_index) -> (Tensor? loss, Tensor? total_weight)",
    .family = "loss",
    .shape = nll_loss_types,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<NllLoss>(op);
    },
    .work = nll_loss_work,
    .layer = true,
};

extern const OpDef kNllLossGrad{
    .name = "nll_loss_grad",
    .schema =
        "nll_loss_grad(Tensor{floats} gradient, Tensor{floats}? total_weight, "
        "Tensor{indices} labels, Tensor{floats}? weights, *, "
        "str{none, mean, sum} reduction, int ignore_index, int{1..} classes, "
        "dtype{floats} dtype) -> Tensor",
    .family = "loss",
    .shape = nll_loss_grad_type,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<NllLossGrad>(op);
    },
    .work = elementwise<1>,
    .layer = true,
};

extern const OpDef kCrossEntropyGrad{
    .name = "cross_entropy_grad",
    .schema =
        "cross_entropy_grad(Tensor{floats} gradient, "
        "Tensor{floats}? total_weight, Tensor{indices} labels, "
        "Tensor{floats}? weights, Tensor{floats} log_softmax, *, "
        "str{none, mean, sum} reduction, int ignore_index, int{1..} classes, "
        "dtype{floats} dtype) -> Tensor",
    .family = "loss",
    .shape = nll_loss_grad_type,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<CrossEntropyGrad>(op);
    },
    .work = elementwise<14>,
    .layer = true,
};

}  // namespace popsim::ops
