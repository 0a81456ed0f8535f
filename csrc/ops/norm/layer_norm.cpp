// Layer norm: normalises rows to mean 0 and variance 1, then scales and shifts
// each column.
#include <limits>
#include <optional>

#include "ops/math/reduce_functions.h"
#include "ops/norm/norm_rows.h"
#include "ops/op_def.h"
#include "ops/work.h"
#include "threads/tasks.h"

namespace popsim::ops {
namespace {

// The axes that are normalised, and the shape in which these axes have size 1.
struct Normed {
  Shape row;
  Shape moments;

  Normed(const OpCall& op, size_t x) {
    const Shape& shape = op.input(x).shape;
    const auto axes = static_cast<size_t>(op.attribute<int64_t>("axes"));
    op.require(axes <= shape.size(), "input ", x, " has ", axes,
               " axes or more to normalise");
    op.require(op.input(x).numel() > 0, "input ", x, " is not empty");
    const auto first = shape.end() - static_cast<std::ptrdiff_t>(axes);
    row.assign(first, shape.end());
    moments.assign(shape.begin(), first);
    moments.resize(shape.size(), 1);
  }
};

int64_t width_of(const OpCall& op, size_t x) {
  return num_elements(Normed(op, x).row);
}

class LayerNorm final : public Kernel {
 public:
  explicit LayerNorm(const OpView& op)
      : width_(width_of(op, 0)),
        rows_(op.input(0).numel() / width_),
        epsilon_(static_cast<float>(op.attribute<double>("epsilon"))),
        x_(op, 0, width_),
        weight_(optional_row(op, 1, width_)),
        bias_(optional_row(op, 2, width_)),
        out_(optional_output(op, 0, width_)),
        mean_(optional_output(op, 1, 1)),
        rstd_(optional_output(op, 2, 1)),
        shares_(threads::elements(2 * op.input(0).numel()), rows_),
        scratch_(static_cast<size_t>(shares_.limit())) {
    for (auto& floats : scratch_) {
      floats.resize(static_cast<size_t>(4 * padded(width_)));
    }
  }

  void run(const RunContext& context) override {
    shares_.run([&](int64_t share, threads::Range rows) {
      float* scratch = scratch_[static_cast<size_t>(share)].data();
      const int64_t step = padded(width_);
      const float* weight =
          weight_ ? weight_->read(context, 0, scratch + 2 * step) : nullptr;
      const float* bias =
          bias_ ? bias_->read(context, 0, scratch + 3 * step) : nullptr;
      for (int64_t row = rows.begin; row < rows.end; ++row) {
        const float* x = x_.read(context, row, scratch);
        auto [mean, rstd] = row_moments(x, width_, epsilon_);
        // As in PyTorch, a variance that overflows gives NaN, not the bias.
        if (rstd == 0.0f) rstd = std::numeric_limits<float>::quiet_NaN();
        if (mean_) mean_->write(context, row, 0, 1, &mean);
        if (rstd_) rstd_->write(context, row, 0, 1, &rstd);
        if (!out_) continue;
        float* out = out_->space(context, row, scratch + step);
        normalise(x, mean, rstd, weight, bias, out);
        out_->store(context, row, out);
      }
    });
  }

 private:
  void normalise(const float* x, float mean, float rstd, const float* weight,
                 const float* bias, float* out) const {
    const Vec center(mean);
    const Vec scale(rstd);
    for_each_vector(width_, [&](int64_t i, auto n) {
      Vec y = (load(x + i, n) - center) * scale;
      if (weight != nullptr) y = y * load(weight + i, n);
      if (bias != nullptr) y = y + load(bias + i, n);
      store(y, out + i, n);
    });
  }

  int64_t width_;
  int64_t rows_;
  float epsilon_;
  RowInput x_;
  std::optional<RowInput> weight_;
  std::optional<RowInput> bias_;
  std::optional<RowOutput> out_;
  std::optional<RowOutput> mean_;
  std::optional<RowOutput> rstd_;
  threads::Shares shares_;
  std::vector<std::vector<float>> scratch_;  // by share
};

// Number of rows whose part of the weight's gradient is added up in registers.
constexpr int64_t kRowGroup = 4;

class LayerNormGrad final : public Kernel {
 public:
  explicit LayerNormGrad(const OpView& op)
      : width_(width_of(op, 1)),
        rows_(op.input(1).numel() / width_),
        gradient_(op, 0, width_),
        x_(op, 1, width_),
        mean_(op, 2, 1),
        rstd_(op, 3, 1),
        weight_(optional_row(op, 4, width_)),
        for_x_(optional_output(op, 0, width_)),
        for_weight_(optional_output(op, 1, width_)),
        for_bias_(optional_output(op, 2, width_)),
        tasks_(threads::elements(3 * op.input(1).numel()), rows_),
        scratch_(static_cast<size_t>(tasks_.count())) {
    for (auto& floats : scratch_) {
      floats.resize(static_cast<size_t>(kBuffers * padded(width_)));
    }
  }

  void run(const RunContext& context) override {
    tasks_.run([&](int64_t task, threads::Range rows) {
      run_task(context, task, rows);
    });
    if (for_weight_) add_up(context, *for_weight_, kForWeight);
    if (for_bias_) add_up(context, *for_bias_, kForBias);
  }

 private:
  // The buffers of a task, each as wide as a row.
  static constexpr int64_t kForWeight = 0;
  static constexpr int64_t kForBias = 1;
  static constexpr int64_t kWeight = 2;
  static constexpr int64_t kForX = 3;
  static constexpr int64_t kRows = 4;
  static constexpr int64_t kBuffers = kRows + 2 * kRowGroup;

  struct Row {
    const float* gradient;
    const float* x;
    float mean;
    float rstd;
    float sum = 0.0f;         // of gradient * weight
    float projection = 0.0f;  // of gradient * weight * normalised x
  };

  [[nodiscard]] float* buffer(int64_t task, int64_t index) {
    return scratch_[static_cast<size_t>(task)].data() + index * padded(width_);
  }

  void run_task(const RunContext& context, int64_t task, threads::Range range) {
    std::fill_n(buffer(task, 0), 2 * padded(width_), 0.0f);
    const float* weight =
        weight_ ? weight_->read(context, 0, buffer(task, kWeight)) : nullptr;
    int64_t row = range.begin;
    for (; row + kRowGroup <= range.end; row += kRowGroup) {
      run_rows<kRowGroup>(context, task, row, weight);
    }
    for (; row < range.end; ++row) run_rows<1>(context, task, row, weight);
  }

  template <int64_t kCount>
  void run_rows(const RunContext& context, int64_t task, int64_t first,
                const float* weight) {
    std::array<Row, kCount> rows;
    for (int64_t k = 0; k < kCount; ++k) {
      Row& row = rows[static_cast<size_t>(k)];
      row.gradient =
          gradient_.read(context, first + k, buffer(task, kRows + 2 * k));
      row.x = x_.read(context, first + k, buffer(task, kRows + 2 * k + 1));
      float value = 0.0f;
      row.mean = *mean_.read(context, first + k, &value);
      row.rstd = *rstd_.read(context, first + k, &value);
    }
    if (weight != nullptr) {
      add_rows<true>(rows, weight, buffer(task, kForWeight),
                     buffer(task, kForBias));
    } else {
      add_rows<false>(rows, weight, buffer(task, kForWeight),
                      buffer(task, kForBias));
    }
    if (!for_x_) return;
    for (int64_t k = 0; k < kCount; ++k) {
      float* out = for_x_->space(context, first + k, buffer(task, kForX));
      write_for_x(rows[static_cast<size_t>(k)], weight, out);
      for_x_->store(context, first + k, out);
    }
  }

  template <bool kHasWeight, size_t kCount>
  void add_rows(std::array<Row, kCount>& rows, const float* weight,
                float* for_weight, float* for_bias) const {
    std::array<Vec, kCount> sums;
    std::array<Vec, kCount> projections;
    sums.fill(Vec(0.0f));
    projections.fill(Vec(0.0f));
    for_each_vector(width_, [&](int64_t i, auto n) {
      Vec of_weight = load(for_weight + i, n);
      Vec of_bias = load(for_bias + i, n);
      for (size_t k = 0; k < kCount; ++k) {
        const Row& row = rows[k];
        Vec g = load(row.gradient + i, n);
        // After the end there are zeros, because g is 0 there.
        const Vec y = (load(row.x + i, n) - Vec(row.mean)) * Vec(row.rstd);
        of_weight = at::vec::fmadd(g, y, of_weight);
        of_bias = of_bias + g;
        if constexpr (kHasWeight) g = g * load(weight + i, n);
        sums[k] = sums[k] + g;
        projections[k] =
            at::vec::fmadd(g, keep(y, Vec(0.0f), n), projections[k]);
      }
      store(of_weight, for_weight + i, n);
      store(of_bias, for_bias + i, n);
    });
    for (size_t k = 0; k < kCount; ++k) {
      rows[k].sum = sum_across(sums[k]);
      rows[k].projection = sum_across(projections[k]);
    }
  }

  void write_for_x(const Row& row, const float* weight, float* out) const {
    const auto count = static_cast<float>(width_);
    const Vec mean(row.mean);
    const Vec rstd(row.rstd);
    const Vec sum(row.sum / count);
    const Vec projection(-row.projection / count);
    for_each_vector(width_, [&](int64_t i, auto n) {
      Vec g = load(row.gradient + i, n);
      if (weight != nullptr) g = g * load(weight + i, n);
      const Vec y = (load(row.x + i, n) - mean) * rstd;
      store(at::vec::fmadd(y, projection, g - sum) * rstd, out + i, n);
    });
  }

  void add_up(const RunContext& context, const RowOutput& out, int64_t index) {
    float* total = buffer(0, index);
    const ReduceFunctions* sum = find_reduce_functions("sum");
    for (int64_t task = 1; task < tasks_.count(); ++task) {
      sum->rows(buffer(task, index), 0, 1, total, width_);
    }
    out.write(context, 0, 0, width_, total);
  }

  int64_t width_;
  int64_t rows_;
  RowInput gradient_;
  RowInput x_;
  RowInput mean_;
  RowInput rstd_;
  std::optional<RowInput> weight_;
  std::optional<RowOutput> for_x_;
  std::optional<RowOutput> for_weight_;
  std::optional<RowOutput> for_bias_;
  threads::Tasks tasks_;
  std::vector<std::vector<float>> scratch_;  // by task
};

std::vector<TensorType> layer_norm_types(const OpCall& op) {
  const Normed normed(op, 0);
  for (const size_t i : {1, 2}) {
    if (op.has_input(i)) op.require_shape(i, normed.row);
  }
  const TensorType moments{DType::kFloat32, normed.moments};
  return {op.input_type(0), moments, moments};
}

std::vector<TensorType> layer_norm_grad_types(const OpCall& op) {
  const Normed normed(op, 1);
  op.require_shape(0, op.input(1).shape);
  for (const size_t i : {2, 3}) op.require_shape(i, normed.moments);
  TensorType of_weight{op.input(1).dtype, normed.row};
  if (op.has_input(4)) {
    op.require_shape(4, normed.row);
    of_weight.dtype = op.input(4).dtype;
  }
  return {op.input_type(1), of_weight, of_weight};
}

}  // namespace

extern const OpDef kLayerNorm{
    .name = "layer_norm",
    .schema =
        "layer_norm(Tensor{floats} x, Tensor{floats}? weight, "
        "Tensor{floats}? bias, *, int{1..} axes, float epsilon) -> "
        "(Tensor? y, Tensor? mean, Tensor? rstd)",
    .family = "norm",
    .shape = layer_norm_types,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<LayerNorm>(op);
    },
    .work = elementwise<8>,
    .cheap = true,
};

extern const OpDef kLayerNormGrad{
    .name = "layer_norm_grad",
    .schema =
        "layer_norm_grad(Tensor{floats} gradient, Tensor{floats} x, "
        "Tensor{floats} mean, Tensor{floats} rstd, Tensor{floats}? weight, *, "
        "int{1..} axes) -> (Tensor? for_x, Tensor? for_weight, "
        "Tensor? for_bias)",
    .family = "norm",
    .shape = layer_norm_grad_types,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<LayerNormGrad>(op);
    },
    .work = elementwise<12>,
};

}  // namespace popsim::ops
