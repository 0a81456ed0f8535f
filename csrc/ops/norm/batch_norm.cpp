// Batch norm in training: the statistics of a batch, and the sums that the
// gradients need. The rest is elementwise, and a map fuses it with the ops
// before and after it.
#include <algorithm>
#include <cmath>
#include <optional>

#include "ops/math/column_sums.h"
#include "ops/norm/channel_walk.h"
#include "ops/op_def.h"
#include "ops/operands/image_layout.h"
#include "ops/work.h"

namespace popsim::ops {
namespace {

using Vec = at::vec::Vectorized<float>;
using Floats = std::vector<float>;
using Doubles = std::vector<double>;

// One value per channel, of any floating-point dtype.
class ChannelInput {
 public:
  ChannelInput(const OpView& op, size_t i)
      : id_(op.input_id(i)),
        stride_(op.input(i).strides.at(0)),
        load_(load_floats(op.input(i).dtype)),
        values_(static_cast<size_t>(op.input(i).numel())) {}

  const Floats& load(const RunContext& context) {
    load_(context.data(id_), 0, stride_, static_cast<int64_t>(values_.size()),
          values_.data());
    return values_;
  }

 private:
  graph::TensorId id_;
  int64_t stride_;
  LoadFloats load_;
  Floats values_;
};

class ChannelOutputs {
 public:
  explicit ChannelOutputs(const OpView& op) : ids_(op.op().outputs) {
    for (size_t i = 0; i < ids_.size(); ++i) {
      stores_.push_back(ids_[i] == graph::kNoTensor
                            ? nullptr
                            : store_floats(op.output(i).dtype));
    }
  }

  // Does nothing for a result that no op reads.
  void store(const RunContext& context, size_t i, const Floats& values) const {
    if (stores_[i] == nullptr) return;
    stores_[i](values.data(), false, context.data(ids_[i]), 0,
               static_cast<int64_t>(values.size()));
  }

 private:
  std::vector<graph::TensorId> ids_;
  std::vector<StoreFloats> stores_;
};

// Adds up the columns of each channel: `folded` gets one value for each channel
// of the block. The block has one channel or all of them.
void fold(const Floats& columns, int64_t width, Floats& folded) {
  const auto channels = static_cast<int64_t>(folded.size());
  if (channels == 1) {
    float sum = 0.0f;
    for (int64_t i = 0; i < width; ++i) sum += columns[static_cast<size_t>(i)];
    folded[0] = sum;
    return;
  }
  std::copy_n(columns.begin(), channels, folded.begin());
  for (int64_t first = channels; first < width; first += channels) {
    const float* from = columns.data() + first;
    for (int64_t c = 0; c < channels; ++c) {
      folded[static_cast<size_t>(c)] += from[c];
    }
  }
}

// Repeats the values of the channels for all columns.
void repeat(const float* values, int64_t channels, Floats& columns) {
  const auto width = static_cast<int64_t>(columns.size());
  for (int64_t first = 0; first < width; first += channels) {
    std::copy_n(values, channels, columns.begin() + first);
  }
}

// --- Statistics ---

// Mean and sum of squared deviations of a part of the tensor.
class PartMoments {
 public:
  explicit PartMoments(const ChannelWalk& walk)
      : interleaved_(walk.interleaved()),
        columns_(static_cast<size_t>(walk.max_width())),
        square_columns_(columns_.size()),
        means_(columns_.size()),
        block_means_(interleaved_ ? static_cast<size_t>(walk.channels()) : 1),
        block_rests_(block_means_.size()),
        block_squares_(block_means_.size()),
        count(interleaved_ ? 1 : static_cast<size_t>(walk.channels())),
        mean(static_cast<size_t>(walk.channels())),
        squares(mean.size()) {}

  void clear() {
    std::ranges::fill(count, 0.0);
    std::ranges::fill(mean, 0.0);
    std::ranges::fill(squares, 0.0);
  }

  // Makes two passes over a block in L1, then one update of the moments: there
  // is no cancellation, however far the mean is from 0. The sum of the
  // deviations, which is not zero because of rounding, corrects the mean.
  void add(const float* x, const ChannelBlock& block) {
    const auto channels = static_cast<int64_t>(block_means_.size());
    const auto size = static_cast<double>(block.rows * block.width / channels);
    column_sums<1>(
        block.rows, block.width, {columns_.data()},
        [x](int64_t, int64_t offset, int64_t lanes, std::array<Vec, 1>& sums) {
          sums[0] = sums[0] + Vec::loadu(x + offset, lanes);
        });
    fold(columns_, block.width, block_means_);
    for (float& value : block_means_) value /= static_cast<float>(size);
    repeat(block_means_.data(), channels, means_);
    column_sums<2>(
        block.rows, block.width, {columns_.data(), square_columns_.data()},
        [x, this](int64_t column, int64_t offset, int64_t lanes,
                  std::array<Vec, 2>& sums) {
          const Vec deviation = Vec::loadu(x + offset, lanes) -
                                Vec::loadu(means_.data() + column, lanes);
          sums[0] = sums[0] + deviation;
          sums[1] = at::vec::fmadd(deviation, deviation, sums[1]);
        });
    fold(columns_, block.width, block_rests_);
    fold(square_columns_, block.width, block_squares_);
    merge(block.channel, size);
  }

 private:
  void merge(int64_t channel, double size) {
    double& before = count[interleaved_ ? 0 : static_cast<size_t>(channel)];
    const double share = size / (before + size);
    const double weight = before * share;
    before += size;
    double* to_mean = mean.data() + channel;
    double* to_squares = squares.data() + channel;
    const double part = 1.0 / size;
    for (size_t c = 0; c < block_means_.size(); ++c) {
      const double rest = static_cast<double>(block_rests_[c]);
      const double delta =
          static_cast<double>(block_means_[c]) + rest * part - to_mean[c];
      to_mean[c] += delta * share;
      to_squares[c] += static_cast<double>(block_squares_[c]) -
                       rest * rest * part + delta * delta * weight;
    }
  }

  bool interleaved_;
  Floats columns_;
  Floats square_columns_;
  Floats means_;
  Floats block_means_;
  Floats block_rests_;  // sums of the deviations from the means
  Floats block_squares_;

 public:
  Doubles count;  // by channel; a single one if it is the same for all channels
  Doubles mean;
  Doubles squares;
};

class Statistics final : public Kernel {
 public:
  explicit Statistics(const OpView& op)
      : walk_(op.input(0), 4),
        x_(op.input_id(0), op.input(0), walk_),
        parts_(static_cast<size_t>(walk_.tasks().count()), PartMoments(walk_)),
        outputs_(op),
        momentum_(op.attribute<double>("momentum")),
        epsilon_(op.attribute<double>("epsilon")) {
    if (op.has_input(1)) weight_.emplace(op, 1);
    if (op.has_input(2)) running_mean_.emplace(op, 2);
    if (op.has_input(3)) running_variance_.emplace(op, 3);
    const auto channels = static_cast<size_t>(walk_.channels());
    for (Floats* values : {&mean_, &inverse_deviation_, &scale_, &running_}) {
      values->resize(channels);
    }
    variance_.resize(channels);
  }

  void run(const RunContext& context) override {
    walk_.tasks().run([&](int64_t index, threads::Range units) {
      PartMoments& part = parts_[static_cast<size_t>(index)];
      part.clear();
      walk_.for_each_block(units, [&](const ChannelBlock& block) {
        part.add(x_.read(context, block, index), block);
      });
    });
    for (size_t c = 0; c < mean_.size(); ++c) finish_channel(c);
    outputs_.store(context, 0, mean_);
    outputs_.store(context, 1, inverse_deviation_);
    store_scale(context);
    store_running(context);
  }

 private:
  void finish_channel(size_t c) {
    double count = 0.0;
    double mean = 0.0;
    double squares = 0.0;
    for (const PartMoments& part : parts_) {
      const double size = part.count[part.count.size() == 1 ? 0 : c];
      if (size == 0.0) continue;
      const double delta = part.mean[c] - mean;
      const double share = size / (count + size);
      mean += delta * share;
      squares += part.squares[c] + delta * delta * count * share;
      count += size;
    }
    mean_[c] = static_cast<float>(mean);
    variance_[c] = squares / count;
    inverse_deviation_[c] =
        static_cast<float>(1.0 / std::sqrt(variance_[c] + epsilon_));
  }

  void store_scale(const RunContext& context) {
    scale_ = inverse_deviation_;
    if (weight_) {
      const Floats& weight = weight_->load(context);
      for (size_t c = 0; c < scale_.size(); ++c) scale_[c] *= weight[c];
    }
    outputs_.store(context, 2, scale_);
  }

  // The running variance is an unbiased estimate.
  void store_running(const RunContext& context) {
    if (!running_mean_ || !running_variance_) return;
    const Floats& means = running_mean_->load(context);
    for (size_t c = 0; c < running_.size(); ++c) {
      running_[c] = moved(means[c], static_cast<double>(mean_[c]));
    }
    outputs_.store(context, 3, running_);
    const Floats& variances = running_variance_->load(context);
    const auto count = static_cast<double>(walk_.count());
    for (size_t c = 0; c < running_.size(); ++c) {
      running_[c] = moved(variances[c], variance_[c] * count / (count - 1.0));
    }
    outputs_.store(context, 4, running_);
  }

  [[nodiscard]] float moved(float before, double now) const {
    return static_cast<float>(momentum_ * now +
                              (1.0 - momentum_) * static_cast<double>(before));
  }

  ChannelWalk walk_;
  BlockReader x_;
  std::vector<PartMoments> parts_;
  ChannelOutputs outputs_;
  double momentum_;
  double epsilon_;
  std::optional<ChannelInput> weight_;
  std::optional<ChannelInput> running_mean_;
  std::optional<ChannelInput> running_variance_;
  Floats mean_;
  Doubles variance_;
  Floats inverse_deviation_;
  Floats scale_;
  Floats running_;
};

// --- Gradient ---

struct PartSums {
  explicit PartSums(const ChannelWalk& walk)
      : columns_grad(static_cast<size_t>(walk.max_width())),
        columns_product(columns_grad.size()),
        means(columns_grad.size()),
        folded(walk.interleaved() ? static_cast<size_t>(walk.channels()) : 1),
        grad(static_cast<size_t>(walk.channels())),
        product(grad.size()) {}

  void add(const float* grad_y, const float* x, const ChannelBlock& block) {
    column_sums<2>(
        block.rows, block.width, {columns_grad.data(), columns_product.data()},
        [=, this](int64_t column, int64_t offset, int64_t lanes,
                  std::array<Vec, 2>& sums) {
          const Vec gradient = Vec::loadu(grad_y + offset, lanes);
          const Vec deviation = Vec::loadu(x + offset, lanes) -
                                Vec::loadu(means.data() + column, lanes);
          sums[0] = sums[0] + gradient;
          sums[1] = at::vec::fmadd(gradient, deviation, sums[1]);
        });
    add_folded(columns_grad, block, grad);
    add_folded(columns_product, block, product);
  }

  void add_folded(const Floats& columns, const ChannelBlock& block,
                  Doubles& totals) {
    fold(columns, block.width, folded);
    double* to = totals.data() + block.channel;
    for (size_t c = 0; c < folded.size(); ++c) {
      to[c] += static_cast<double>(folded[c]);
    }
  }

  Floats columns_grad;
  Floats columns_product;
  Floats means;
  Floats folded;
  Doubles grad;     // by channel: sum of the gradients
  Doubles product;  // ... times the deviations from the mean
};

class Gradient final : public Kernel {
 public:
  explicit Gradient(const OpView& op)
      : walk_(op.input(1), 4),
        grad_y_(op.input_id(0), op.input(0), walk_),
        x_(op.input_id(1), op.input(1), walk_),
        mean_(op, 2),
        inverse_deviation_(op, 3),
        parts_(static_cast<size_t>(walk_.tasks().count()), PartSums(walk_)),
        outputs_(op) {
    if (op.has_input(4)) weight_.emplace(op, 4);
    for (Floats& values : results_) {
      values.resize(static_cast<size_t>(walk_.channels()));
    }
  }

  void run(const RunContext& context) override {
    const Floats& mean = mean_.load(context);
    walk_.tasks().run([&](int64_t index, threads::Range units) {
      PartSums& part = parts_[static_cast<size_t>(index)];
      std::ranges::fill(part.grad, 0.0);
      std::ranges::fill(part.product, 0.0);
      if (walk_.interleaved()) {
        repeat(mean.data(), walk_.channels(), part.means);
      }
      walk_.for_each_block(units, [&](const ChannelBlock& block) {
        if (!walk_.interleaved()) {
          std::ranges::fill(part.means,
                            mean[static_cast<size_t>(block.channel)]);
        }
        part.add(grad_y_.read(context, block, index),
                 x_.read(context, block, index), block);
      });
    });
    finish(context);
  }

 private:
  void finish(const RunContext& context) {
    const Floats& inverse_deviation = inverse_deviation_.load(context);
    const Floats* weight = weight_ ? &weight_->load(context) : nullptr;
    const auto count = static_cast<double>(walk_.count());
    for (size_t c = 0; c < inverse_deviation.size(); ++c) {
      double grad = 0.0;
      double product = 0.0;
      for (const PartSums& part : parts_) {
        grad += part.grad[c];
        product += part.product[c];
      }
      const auto inverse = static_cast<double>(inverse_deviation[c]);
      const double scale = weight == nullptr
                               ? inverse
                               : inverse * static_cast<double>((*weight)[c]);
      results_[0][c] = static_cast<float>(product * inverse);
      results_[1][c] = static_cast<float>(grad);
      results_[2][c] = static_cast<float>(scale);
      results_[3][c] =
          static_cast<float>(-scale * inverse * inverse * product / count);
      results_[4][c] = static_cast<float>(-scale * grad / count);
    }
    for (size_t i = 0; i < results_.size(); ++i) {
      outputs_.store(context, i, results_[i]);
    }
  }

  ChannelWalk walk_;
  BlockReader grad_y_;
  BlockReader x_;
  ChannelInput mean_;
  ChannelInput inverse_deviation_;
  std::optional<ChannelInput> weight_;
  std::vector<PartSums> parts_;
  ChannelOutputs outputs_;
  std::array<Floats, 5> results_;
};

// Each input from `first` on has one value per channel of an image.
Shape check_channels(const OpCall& op, size_t x, size_t first) {
  const graph::Tensor& image = op.input(x);
  op.require(image.shape.size() >= 2 && image.numel() > 0 && is_image(image),
             "input ", x, " is an image, contiguous or channels last");
  Shape channels{image.shape[1]};
  for (size_t i = first; i < op.num_inputs(); ++i) {
    if (op.has_input(i)) op.require_shape(i, channels);
  }
  return channels;
}

// Statistics stay float32 if x is float16.
std::vector<TensorType> statistics_types(const OpCall& op) {
  const TensorType vector{DType::kFloat32, check_channels(op, 0, 1)};
  std::vector<TensorType> types(3, vector);
  const bool runs = op.has_input(2) && op.has_input(3);
  types.resize(5, runs ? vector : TensorType::none());
  return types;
}

std::vector<TensorType> gradient_types(const OpCall& op) {
  const TensorType vector{DType::kFloat32, check_channels(op, 1, 2)};
  op.require_shape(0, op.input(1).shape);
  op.require(is_image(op.input(0)) &&
                 is_channels_last(op.input(0)) == is_channels_last(op.input(1)),
             "the gradient has the same order in memory as x");
  TensorType of_weight = vector;
  of_weight.dtype = op.input(op.has_input(4) ? 4 : 1).dtype;
  return {of_weight, of_weight, vector, vector, vector};
}

std::vector<graph::Work> statistics_work(const OpView& op) {
  const graph::Tensor& x = op.input(0);
  return {graph::Reduce{4 * x.numel(), 2 * x.shape[1]}};
}

std::vector<graph::Work> gradient_work(const OpView& op) {
  const graph::Tensor& x = op.input(1);
  return {graph::Reduce{4 * x.numel(), 2 * x.shape[1]}};
}

}  // namespace

extern const OpDef kBatchNormStatistics{
    .name = "batch_norm_statistics",
    .schema =
        "batch_norm_statistics(Tensor{floats} x, Tensor{floats}? weight, "
        "Tensor{floats}? running_mean, Tensor{floats}? running_variance, *, "
        "float momentum, float epsilon) -> (Tensor? mean, "
        "Tensor? inverse_deviation, Tensor? scale, Tensor? new_running_mean, "
        "Tensor? new_running_variance)",
    .family = "norm",
    .shape = statistics_types,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<Statistics>(op);
    },
    .work = statistics_work,
};

extern const OpDef kBatchNormGrad{
    .name = "batch_norm_grad",
    .schema =
        "batch_norm_grad(Tensor{floats} grad_y, Tensor{floats} x, "
        "Tensor{floats} mean, Tensor{floats} inverse_deviation, "
        "Tensor{floats}? weight) -> (Tensor? grad_weight, Tensor? grad_bias, "
        "Tensor? of_grad_y, Tensor? of_deviation, Tensor? shift)",
    .family = "norm",
    .shape = gradient_types,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<Gradient>(op);
    },
    .work = gradient_work,
};

}  // namespace popsim::ops
