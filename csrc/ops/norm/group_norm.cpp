// Group norm: normalises each sample's groups of channels to mean 0 and
// variance 1, then scales and shifts each channel.
//
// A row is one group of one sample: `channels` sequences of `pixels` elements.
#include "ops/norm/norm_rows.h"
#include "ops/op_def.h"
#include "ops/work.h"
#include "threads/tasks.h"

namespace popsim::ops {
namespace {

struct Groups {
  explicit Groups(const OpCall& op, size_t x) {
    const Shape& shape = op.input(x).shape;
    groups = op.attribute<int64_t>("groups");
    op.require(
        shape.size() >= 2 && op.input(x).numel() > 0 && shape[1] % groups == 0,
        "the channels of input ", x, " can be divided into ", groups,
        " groups");
    samples = shape[0];
    channels = shape[1] / groups;
    pixels = op.input(x).numel() / (shape[0] * shape[1]);
    rows = samples * groups;
    width = channels * pixels;
  }

  [[nodiscard]] Shape moments() const { return {samples, groups}; }
  // The first channel of a row.
  [[nodiscard]] int64_t first_channel(int64_t row) const {
    return row % groups * channels;
  }

  int64_t groups;
  int64_t samples;
  int64_t channels;  // of a group
  int64_t pixels;
  int64_t rows;
  int64_t width;
};

class GroupNorm final : public Kernel {
 public:
  explicit GroupNorm(const OpView& op)
      : of_(op, 0),
        epsilon_(static_cast<float>(op.attribute<double>("epsilon"))),
        x_(op, 0, of_.width),
        weight_(optional_row(op, 1, 1)),
        bias_(optional_row(op, 2, 1)),
        out_(optional_output(op, 0, of_.width)),
        mean_(optional_output(op, 1, 1)),
        rstd_(optional_output(op, 2, 1)),
        shares_(threads::elements(2 * op.input(0).numel()), of_.rows),
        scratch_(static_cast<size_t>(shares_.limit())) {
    for (auto& floats : scratch_) {
      floats.resize(static_cast<size_t>(2 * padded(of_.width)));
    }
  }

  void run(const RunContext& context) override {
    shares_.run([&](int64_t share, threads::Range rows) {
      float* scratch = scratch_[static_cast<size_t>(share)].data();
      for (int64_t row = rows.begin; row < rows.end; ++row) {
        run_row(context, row, scratch);
      }
    });
  }

 private:
  void run_row(const RunContext& context, int64_t row, float* scratch) const {
    const float* x = x_.read(context, row, scratch);
    const auto [mean, rstd] = row_moments(x, of_.width, epsilon_);
    if (mean_) mean_->write(context, row, 0, 1, &mean);
    if (rstd_) rstd_->write(context, row, 0, 1, &rstd);
    if (!out_) return;
    float* out = out_->space(context, row, scratch + padded(of_.width));
    for (int64_t c = 0; c < of_.channels; ++c) {
      const int64_t channel = of_.first_channel(row) + c;
      float value = 0.0f;
      const float weight =
          weight_ ? *weight_->read(context, channel, &value) : 1.0f;
      const Vec shift(bias_ ? *bias_->read(context, channel, &value) : 0.0f);
      const Vec center(mean);
      const Vec scale(rstd * weight);
      const int64_t first = c * of_.pixels;
      for_each_vector(of_.pixels, [&](int64_t i, auto n) {
        const Vec y =
            at::vec::fmadd(load(x + first + i, n) - center, scale, shift);
        store(y, out + first + i, n);
      });
    }
    out_->store(context, row, out);
  }

  Groups of_;
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

class GroupNormGrad final : public Kernel {
 public:
  explicit GroupNormGrad(const OpView& op)
      : of_(op, 1),
        gradient_(op, 0, of_.width),
        x_(op, 1, of_.width),
        mean_(op, 2, 1),
        rstd_(op, 3, 1),
        weight_(optional_row(op, 4, 1)),
        for_x_(optional_output(op, 0, of_.width)),
        for_weight_(optional_output(op, 1, 1)),
        for_bias_(optional_output(op, 2, 1)),
        shares_(threads::elements(3 * op.input(1).numel()), of_.rows),
        scratch_(static_cast<size_t>(shares_.limit())),
        projections_(static_cast<size_t>(of_.rows * of_.channels)),
        sums_(projections_.size()) {
    for (auto& floats : scratch_) {
      floats.resize(static_cast<size_t>(3 * padded(of_.width)));
    }
  }

  void run(const RunContext& context) override {
    shares_.run([&](int64_t share, threads::Range rows) {
      float* scratch = scratch_[static_cast<size_t>(share)].data();
      for (int64_t row = rows.begin; row < rows.end; ++row) {
        run_row(context, row, scratch);
      }
    });
    if (for_weight_) add_up(context, *for_weight_, projections_);
    if (for_bias_) add_up(context, *for_bias_, sums_);
  }

 private:
  // The sums over all channels of a row that the row's gradient needs.
  struct Moments {
    float mean;
    float rstd;
    float sum = 0.0f;         // of gradient * weight
    float projection = 0.0f;  // of gradient * weight * normalised x
  };

  [[nodiscard]] float weight(const RunContext& context, int64_t row,
                             int64_t c) const {
    float value = 0.0f;
    return weight_ ? *weight_->read(context, of_.first_channel(row) + c, &value)
                   : 1.0f;
  }

  void run_row(const RunContext& context, int64_t row, float* scratch) {
    const int64_t step = padded(of_.width);
    const float* gradient = gradient_.read(context, row, scratch);
    const float* x = x_.read(context, row, scratch + step);
    float value = 0.0f;
    Moments moments{};
    moments.mean = *mean_.read(context, row, &value);
    moments.rstd = *rstd_.read(context, row, &value);
    for (int64_t c = 0; c < of_.channels; ++c) {
      const int64_t first = c * of_.pixels;
      const auto at = static_cast<size_t>(row * of_.channels + c);
      sum_channel(gradient + first, x + first, moments, at);
      const float w = weight(context, row, c);
      moments.sum += w * sums_[at];
      moments.projection += w * projections_[at];
    }
    if (!for_x_) return;
    float* out = for_x_->space(context, row, scratch + 2 * step);
    for (int64_t c = 0; c < of_.channels; ++c) {
      const int64_t first = c * of_.pixels;
      write_channel(gradient + first, x + first, moments,
                    weight(context, row, c), out + first);
    }
    for_x_->store(context, row, out);
  }

  void sum_channel(const float* gradient, const float* x,
                   const Moments& moments, size_t at) {
    const Vec mean(moments.mean);
    sums_[at] = sum_over(of_.pixels, [&](const Vec& before, int64_t i, auto n) {
      return before + load(gradient + i, n);
    });
    projections_[at] =
        moments.rstd *
        sum_over(of_.pixels, [&](const Vec& before, int64_t i, auto n) {
          return at::vec::fmadd(load(gradient + i, n), load(x + i, n) - mean,
                                before);
        });
  }

  void write_channel(const float* gradient, const float* x,
                     const Moments& moments, float weight, float* out) const {
    const auto count = static_cast<float>(of_.width);
    const Vec mean(moments.mean);
    const Vec rstd(moments.rstd);
    const Vec sum(moments.sum / count);
    const Vec projection(-moments.projection / count);
    const Vec scale(weight);
    for_each_vector(of_.pixels, [&](int64_t i, auto n) {
      const Vec y = (load(x + i, n) - mean) * rstd;
      const Vec g = load(gradient + i, n) * scale;
      store(at::vec::fmadd(y, projection, g - sum) * rstd, out + i, n);
    });
  }

  void add_up(const RunContext& context, const RowOutput& out,
              const std::vector<float>& values) const {
    const int64_t channels = of_.groups * of_.channels;
    for (int64_t c = 0; c < channels; ++c) {
      float sum = 0.0f;
      for (int64_t i = 0; i < of_.samples; ++i) {
        sum += values[static_cast<size_t>(i * channels + c)];
      }
      out.write(context, c, 0, 1, &sum);
    }
  }

  Groups of_;
  RowInput gradient_;
  RowInput x_;
  RowInput mean_;
  RowInput rstd_;
  std::optional<RowInput> weight_;
  std::optional<RowOutput> for_x_;
  std::optional<RowOutput> for_weight_;
  std::optional<RowOutput> for_bias_;
  threads::Shares shares_;
  std::vector<std::vector<float>> scratch_;  // by share
  // By sample and channel: the sums over the pixels of the gradient times the
  // normalised input, and of the gradient.
  std::vector<float> projections_;
  std::vector<float> sums_;
};

std::vector<TensorType> types(const OpCall& op) {
  const Groups groups(op, 0);
  for (const size_t i : {1, 2}) {
    if (op.has_input(i)) op.require_shape(i, {op.input(0).shape[1]});
  }
  const TensorType moments{
      dtype_from_name(op.attribute<std::string>("statistics")),
      groups.moments()};
  return {op.input_type(0), moments, moments};
}

std::vector<TensorType> group_norm_grad_types(const OpCall& op) {
  const Groups groups(op, 1);
  op.require_shape(0, op.input(1).shape);
  for (const size_t i : {2, 3}) op.require_shape(i, groups.moments());
  TensorType of_weight{op.input(1).dtype, {op.input(1).shape[1]}};
  if (op.has_input(4)) {
    op.require_shape(4, of_weight.shape);
    of_weight.dtype = op.input(4).dtype;
  }
  return {op.input_type(1), of_weight, of_weight};
}

}  // namespace

extern const OpDef kGroupNorm{
    .name = "group_norm",
    .schema =
        "group_norm(Tensor{floats} x, Tensor{floats}? weight, "
        "Tensor{floats}? bias, *, int{1..} groups, float epsilon, "
        "dtype{floats} statistics=float32) -> (Tensor? y, Tensor? mean, "
        "Tensor? rstd)",
    .family = "norm",
    .shape = types,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<GroupNorm>(op);
    },
    .work = elementwise<8>,
    .cheap = true,
};

extern const OpDef kGroupNormGrad{
    .name = "group_norm_grad",
    .schema =
        "group_norm_grad(Tensor{floats} gradient, Tensor{floats} x, "
        "Tensor{floats} mean, Tensor{floats} rstd, Tensor{floats}? weight, *, "
        "int{1..} groups) -> (Tensor? for_x, Tensor? for_weight, "
        "Tensor? for_bias)",
    .family = "norm",
    .shape = group_norm_grad_types,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<GroupNormGrad>(op);
    },
    .work = elementwise<12>,
};

}  // namespace popsim::ops
