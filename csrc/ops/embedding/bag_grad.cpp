// The gradients of sums, means and maxima of rows of a table: of the table, and
// of the weights of the rows.
#include <algorithm>

#include "base/numbers.h"
#include "ops/embedding/bags.h"
#include "threads/tasks.h"

namespace popsim::ops {
namespace {

// Rows are added in the same order on any number of threads: each share has its
// own columns.
class EmbeddingBagGrad final : public Kernel {
 public:
  explicit EmbeddingBagGrad(const OpView& op)
      : mode_(bag_mode(op)),
        num_rows_(op.attribute<int64_t>("rows")),
        width_(op.output(0).shape[1]),
        bags_(op, 1, 2, op.input(0).shape[0], num_rows_),
        gradient_(op, 0, width_),
        weights_(op, 4),
        out_(op, 0, width_),
        shares_(threads::elements(op.output(0).numel() +
                                  op.input(1).numel() * width_),
                ceil_div(width_, kBagColumns)),
        scratch_(static_cast<size_t>(shares_.limit())) {
    if (mode_ == BagMode::kMax) largest_.emplace(op, 3);
    for (auto& floats : scratch_) {
      floats.resize(static_cast<size_t>(padded(width_)));
    }
    if (!out_.in_place()) {
      sums_.resize(static_cast<size_t>(num_rows_ * width_));
    }
  }

  void run(const RunContext& context) override {
    bags_.read(context);
    weights_.read(context);
    const std::vector<int64_t>* largest =
        largest_ ? &largest_->read(context) : nullptr;
    float* sums = out_.space(context, 0, sums_.data());
    shares_.run([&](int64_t share, threads::Range units) {
      const threads::Range columns{units.begin * kBagColumns,
                                   std::min(units.end * kBagColumns, width_)};
      float* first = sums + columns.begin;
      for (int64_t i = 0; i < num_rows_; ++i) {
        std::fill_n(first + i * width_, columns.size(), 0.0f);
      }
      float* scratch = scratch_[static_cast<size_t>(share)].data();
      for (int64_t bag = 0; bag < bags_.count(); ++bag) {
        const float* gradient = gradient_.read(context, bag, columns.begin,
                                               columns.size(), scratch);
        if (largest != nullptr) {
          give_largest(largest->data() + bag * width_, gradient, columns, sums);
        } else {
          add_bag(bag, gradient, columns, sums);
        }
      }
      if (out_.in_place()) return;
      for (int64_t i = 0; i < num_rows_; ++i) {
        out_.write(context, i, columns.begin, columns.size(),
                   first + i * width_);
      }
    });
  }

 private:
  static constexpr int64_t kBagColumns = 32;  // of a unit

  void add_bag(int64_t bag, const float* gradient, threads::Range columns,
               float* sums) const {
    const auto size = static_cast<float>(
        mode_ == BagMode::kMean ? std::max<int64_t>(bags_.size(bag), 1) : 1);
    const threads::Range range = bags_.of(bag);
    for (int64_t i = range.begin; i < range.end; ++i) {
      if (!bags_.counts(i)) continue;
      add_scaled(gradient, weights_.of(i) / size, columns.size(),
                 sums + bags_.row(i) * width_ + columns.begin);
    }
  }

  void give_largest(const int64_t* rows, const float* gradient,
                    threads::Range columns, float* sums) const {
    for (int64_t k = columns.begin; k < columns.end; ++k) {
      if (rows[k] < 0 || rows[k] >= num_rows_) continue;  // an empty bag
      sums[rows[k] * width_ + k] += gradient[k - columns.begin];
    }
  }

  BagMode mode_;
  int64_t num_rows_;
  int64_t width_;
  Bags bags_;
  RowInput gradient_;
  std::optional<IndexInput> largest_;
  SampleWeights weights_;
  RowOutput out_;
  threads::Shares shares_;
  std::vector<std::vector<float>> scratch_;  // by share
  std::vector<float> sums_;  // used if the output is not float32
};

class BagWeightsGrad final : public Kernel {
 public:
  explicit BagWeightsGrad(const OpView& op)
      : width_(op.input(0).shape[1]),
        bags_(op, 2, 3, op.input(0).shape[0], op.input(1).shape[0]),
        gradient_(op, 0, width_),
        table_(op, 1, width_),
        out_(op, 0),
        values_(static_cast<size_t>(op.output(0).numel())),
        shares_(threads::elements(op.input(2).numel() * width_), bags_.count()),
        scratch_(static_cast<size_t>(shares_.limit())) {
    for (auto& floats : scratch_) {
      floats.resize(static_cast<size_t>(2 * padded(width_)));
    }
  }

  void run(const RunContext& context) override {
    bags_.read(context);
    std::ranges::fill(values_, 0.0f);
    shares_.run([&](int64_t share, threads::Range range) {
      float* scratch = scratch_[static_cast<size_t>(share)].data();
      for (int64_t bag = range.begin; bag < range.end; ++bag) {
        const float* gradient = gradient_.read(context, bag, scratch);
        const threads::Range numbers = bags_.of(bag);
        for (int64_t i = numbers.begin; i < numbers.end; ++i) {
          if (!bags_.counts(i)) continue;
          const float* row =
              table_.read(context, bags_.row(i), scratch + padded(width_));
          values_[static_cast<size_t>(i)] = product(gradient, row);
        }
      }
    });
    out_.write(context, 0, static_cast<int64_t>(values_.size()),
               values_.data());
  }

 private:
  [[nodiscard]] float product(const float* a, const float* b) const {
    Vec sum(0.0f);
    for_each_vector(width_, [&](int64_t k, auto n) {
      sum = at::vec::fmadd(load(a + k, n), load(b + k, n), sum);
    });
    return sum_across(sum);
  }

  int64_t width_;
  Bags bags_;
  RowInput gradient_;
  RowInput table_;
  FloatWriter out_;
  std::vector<float> values_;
  threads::Shares shares_;
  std::vector<std::vector<float>> scratch_;  // by share
};

// Checks a gradient, the indices, and the offsets of its bags.
void require_bags(const OpCall& op, size_t indices) {
  op.require_rank(0, 2);
  op.require_rank(indices, 1);
  op.require_rank(indices + 1, 1);
  const int64_t more = op.input(indices + 1).numel() - op.input(0).shape[0];
  op.require(more == 0 || more == 1, "input ", indices + 1,
             " has an offset for each row of the gradient, and maybe the end");
}

std::vector<TensorType> embedding_bag_grad_type(const OpCall& op) {
  require_bags(op, 1);
  const bool is_max = op.attribute<std::string>("mode") == "max";
  op.require(!is_max || op.has_input(3), "mode 'max' has an input 3");
  if (is_max) op.require_shape(3, op.input(0).shape);
  if (op.has_input(4)) op.require_shape(4, op.input(1).shape);
  return {{op.input(0).dtype,
           {op.attribute<int64_t>("rows"), op.input(0).shape[1]}}};
}

std::vector<TensorType> bag_weights_grad_type(const OpCall& op) {
  require_bags(op, 2);
  op.require_rank(1, 2);
  op.require(op.input(0).shape[1] == op.input(1).shape[1],
             "the rows of inputs 0 and 1 have the same length");
  return {{op.input(0).dtype, op.input(2).shape}};
}

}  // namespace

extern const OpDef kEmbeddingBagGrad{
    .name = "embedding_bag_grad",
    .schema =
        "embedding_bag_grad(Tensor{floats} gradient, Tensor{indices} indices, "
        "Tensor{indices} offsets, Tensor{indices}? largest, "
        "Tensor{floats}? weights, *, int{1..} rows, "
        "str{sum, mean, max} mode, int padding_index=-1) -> Tensor",
    .family = "embedding",
    .shape = embedding_bag_grad_type,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<EmbeddingBagGrad>(op);
    },
    .work = bag_work<1>,
    .only_overflows = true,
};

extern const OpDef kEmbeddingBagWeightsGrad{
    .name = "embedding_bag_weights_grad",
    .schema =
        "embedding_bag_weights_grad(Tensor{floats} gradient, "
        "Tensor{floats} table, Tensor{indices} indices, "
        "Tensor{indices} offsets, *, int padding_index=-1) -> Tensor",
    .family = "embedding",
    .shape = bag_weights_grad_type,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<BagWeightsGrad>(op);
    },
    .work = bag_work<2>,
    .only_overflows = true,
};

}  // namespace popsim::ops
