// Sums, means and maxima of rows of a table, one for each bag of row numbers,
// and their gradients.
#include <algorithm>
#include <array>

#include "base/numbers.h"
#include "ops/math/vec_math.h"
#include "ops/op_def.h"
#include "ops/operands/indices.h"
#include "ops/operands/rows.h"
#include "ops/work.h"
#include "threads/tasks.h"

namespace popsim::ops {
namespace {

enum class BagMode : int8_t { kSum, kMean, kMax };

BagMode bag_mode(const OpCall& op) {
  const auto& mode = op.attribute<std::string>("mode");
  if (mode == "max") return BagMode::kMax;
  return mode == "mean" ? BagMode::kMean : BagMode::kSum;
}

// The row numbers of each bag: bag b has those from its offset to the next one.
class Bags {
 public:
  Bags(const OpView& op, size_t indices, size_t offsets, int64_t num_bags,
       int64_t num_rows)
      : count_(num_bags),
        num_rows_(num_rows),
        padding_(op.attribute<int64_t>("padding_index")),
        indices_(op, indices),
        offsets_(op, offsets) {}

  // Throws UserError if a number or an offset is out of range.
  void read(const RunContext& context) {
    rows_ = &indices_.read(context);
    const std::vector<int64_t>& starts = offsets_.read(context);
    const auto end = static_cast<int64_t>(rows_->size());
    for (const int64_t row : *rows_) {
      check_user(row >= 0 && row < num_rows_, "index ", row,
                 " is out of range: the table has ", num_rows_, " rows");
    }
    ends_.assign(starts.begin(), starts.end());
    if (std::ssize(ends_) == count_) ends_.push_back(end);
    int64_t before = 0;
    for (const int64_t start : ends_) {
      check_user(start >= before && start <= end, "embedding_bag: offset ",
                 start, " is not between ", before, " and ", end,
                 ", the number of indices. Offsets must not decrease.");
      before = start;
    }
    check_user(count_ == 0 || ends_[0] == 0,
               "embedding_bag: the first offset is ", ends_[0],
               ", but must be 0.");
  }

  [[nodiscard]] int64_t count() const { return count_; }
  [[nodiscard]] int64_t num_indices() const {
    return static_cast<int64_t>(rows_->size());
  }
  [[nodiscard]] threads::Range of(int64_t bag) const {
    const auto at = static_cast<size_t>(bag);
    return {ends_[at], ends_[at + 1]};
  }
  [[nodiscard]] int64_t row(int64_t i) const {
    return (*rows_)[static_cast<size_t>(i)];
  }
  [[nodiscard]] bool counts(int64_t i) const { return row(i) != padding_; }
  // The number of rows without padding.
  [[nodiscard]] int64_t size(int64_t bag) const {
    int64_t size = 0;
    const threads::Range range = of(bag);
    for (int64_t i = range.begin; i < range.end; ++i) size += counts(i);
    return size;
  }

 private:
  int64_t count_;
  int64_t num_rows_;
  int64_t padding_;  // a row that does not count; -1: none
  IndexInput indices_;
  IndexInput offsets_;
  const std::vector<int64_t>* rows_ = nullptr;  // of the last read()
  std::vector<int64_t> ends_;  // where bags begin, and where the last one ends
};

void add_scaled(const float* row, float factor, int64_t width, float* sum) {
  const Vec scale(factor);
  for_each_vector(width, [&](int64_t k, auto n) {
    store(at::vec::fmadd(load(row + k, n), scale, load(sum + k, n)), sum + k,
          n);
  });
}

// The weight of each number, as floats.
class SampleWeights {
 public:
  SampleWeights(const OpView& op, size_t input) {
    if (!op.has_input(input)) return;
    reader_.emplace(op, input);
    values_.resize(static_cast<size_t>(op.input(input).numel()));
  }

  void read(const RunContext& context) {
    if (!reader_) return;
    const auto count = static_cast<int64_t>(values_.size());
    const float* read = reader_->read(context, 0, count, values_.data());
    if (read != values_.data()) std::copy_n(read, count, values_.begin());
  }
  [[nodiscard]] float of(int64_t i) const {
    return reader_ ? values_[static_cast<size_t>(i)] : 1.0f;
  }

 private:
  std::optional<FloatReader> reader_;
  std::vector<float> values_;
};

class EmbeddingBag final : public Kernel {
 public:
  explicit EmbeddingBag(const OpView& op)
      : mode_(bag_mode(op)),
        width_(op.input(0).shape[1]),
        bags_(op, 1, 2, num_bags(op), op.input(0).shape[0]),
        table_(op, 0, width_),
        weights_(op, 3),
        y_(op, 0, width_),
        bag_of_(optional_id(op, 1)),
        sizes_(optional_id(op, 2)),
        largest_(optional_id(op, 3)),
        shares_(threads::elements(op.input(1).numel() * width_), bags_.count()),
        scratch_(static_cast<size_t>(shares_.limit())) {
    for (auto& floats : scratch_) {
      floats.resize(static_cast<size_t>(2 * padded(width_)));
    }
  }

  static int64_t num_bags(const OpCall& op) {
    return op.input(2).numel() -
           (op.attribute<bool>("include_last_offset") ? 1 : 0);
  }

  void run(const RunContext& context) override {
    bags_.read(context);
    weights_.read(context);
    shares_.run([&](int64_t share, threads::Range range) {
      float* scratch = scratch_[static_cast<size_t>(share)].data();
      for (int64_t bag = range.begin; bag < range.end; ++bag) {
        float* y = y_.space(context, bag, scratch + padded(width_));
        if (mode_ == BagMode::kMax) {
          find_largest(context, bag, scratch, y);
        } else {
          add_up(context, bag, scratch, y);
        }
        y_.store(context, bag, y);
      }
    });
    write_bags(context);
  }

 private:
  static constexpr int64_t kTogether = 4 * kLanes;  // columns

  static graph::TensorId optional_id(const OpView& op, size_t output) {
    return op.has_output(output) ? op.output_id(output) : graph::kNoTensor;
  }

  void add_up(const RunContext& context, int64_t bag, float* scratch,
              float* y) const {
    const threads::Range range = bags_.of(bag);
    int64_t column = 0;
    if (table_.in_place()) {
      for (; column + kTogether <= width_; column += kTogether) {
        add_block(context, range, column, y);
      }
    }
    std::fill(y + column, y + width_, 0.0f);
    int64_t size = 0;
    for (int64_t i = range.begin; i < range.end; ++i) {
      if (!bags_.counts(i)) continue;
      ++size;
      if (column == width_) continue;
      const float* row =
          table_.read(context, bags_.row(i), column, width_ - column, scratch);
      add_scaled(row, weights_.of(i), width_ - column, y + column);
    }
    if (mode_ == BagMode::kSum || size < 2) return;
    const auto divisor = static_cast<float>(size);
    for (int64_t k = 0; k < width_; ++k) y[k] /= divisor;
  }

  // Adds up some columns, whose sums stay in registers.
  void add_block(const RunContext& context, threads::Range range,
                 int64_t column, float* y) const {
    std::array<Vec, 4> sums{Vec(0.0f), Vec(0.0f), Vec(0.0f), Vec(0.0f)};
    for (int64_t i = range.begin; i < range.end; ++i) {
      if (!bags_.counts(i)) continue;
      const float* row =
          table_.read(context, bags_.row(i), column, kTogether, nullptr);
      const Vec factor(weights_.of(i));
#pragma GCC unroll 4
      for (size_t k = 0; k < sums.size(); ++k) {
        sums[k] =
            at::vec::fmadd(Vec::loadu(row + static_cast<int64_t>(k) * kLanes),
                           factor, sums[k]);
      }
    }
    for (size_t k = 0; k < sums.size(); ++k) {
      sums[k].store(y + column + static_cast<int64_t>(k) * kLanes);
    }
  }

  void find_largest(const RunContext& context, int64_t bag, float* scratch,
                    float* y) const {
    int64_t* rows = largest_ == graph::kNoTensor
                        ? nullptr
                        : context.data<int64_t>(largest_) + bag * width_;
    std::fill_n(y, width_, 0.0f);
    if (rows != nullptr) std::fill_n(rows, width_, int64_t{-1});
    bool begun = false;
    const threads::Range range = bags_.of(bag);
    for (int64_t i = range.begin; i < range.end; ++i) {
      if (!bags_.counts(i)) continue;
      const float* row = table_.read(context, bags_.row(i), scratch);
      for (int64_t k = 0; k < width_; ++k) {
        const bool is_new = !begun || row[k] > y[k];
        y[k] = is_new ? row[k] : y[k];
        if (rows != nullptr) rows[k] = is_new ? bags_.row(i) : rows[k];
      }
      begun = true;
    }
  }

  // Writes what PyTorch keeps for the gradient.
  void write_bags(const RunContext& context) const {
    for (int64_t bag = 0; bag < bags_.count(); ++bag) {
      if (sizes_ != graph::kNoTensor) {
        context.data<int64_t>(sizes_)[bag] = bags_.size(bag);
      }
      if (bag_of_ != graph::kNoTensor) {
        const threads::Range range = bags_.of(bag);
        auto* out = context.data<int64_t>(bag_of_);
        std::fill(out + range.begin, out + range.end, bag);
      }
      if (largest_ != graph::kNoTensor && mode_ != BagMode::kMax) {
        context.data<int64_t>(largest_)[bag] = 0;
      }
    }
    // With include_last_offset, numbers at the end may belong to no bag.
    if (bag_of_ != graph::kNoTensor && bags_.count() > 0) {
      const int64_t end = bags_.of(bags_.count() - 1).end;
      std::fill_n(context.data<int64_t>(bag_of_) + end,
                  bags_.num_indices() - end, bags_.count());
    }
  }

  BagMode mode_;
  int64_t width_;
  Bags bags_;
  RowInput table_;
  SampleWeights weights_;
  RowOutput y_;
  graph::TensorId bag_of_;
  graph::TensorId sizes_;
  graph::TensorId largest_;
  threads::Shares shares_;
  std::vector<std::vector<float>> scratch_;  // by share
};

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

std::vector<TensorType> embedding_bag_types(const OpCall& op) {
  for (const size_t i : {0, 1, 2}) op.require_rank(i, i == 0 ? 2 : 1);
  if (op.has_input(3)) op.require_shape(3, op.input(1).shape);
  const int64_t bags = EmbeddingBag::num_bags(op);
  op.require(bags >= 0, "there is an offset");
  const int64_t width = op.input(0).shape[1];
  const bool is_max = op.attribute<std::string>("mode") == "max";
  return {{op.input(0).dtype, {bags, width}},
          {DType::kInt64, op.input(1).shape},
          {DType::kInt64, {bags}},
          {DType::kInt64, is_max ? Shape{bags, width} : Shape{bags}}};
}

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

// A row for each number.
template <size_t kIndices>
std::vector<graph::Work> bag_work(const OpView& op) {
  return {
      graph::Elementwise{op.input(kIndices).numel() * op.input(0).shape[1], 2}};
}

}  // namespace

extern const OpDef kEmbeddingBag{
    .name = "embedding_bag",
    .schema =
        "embedding_bag(Tensor{floats} table, Tensor{indices} indices, "
        "Tensor{indices} offsets, Tensor{floats}? weights, *, "
        "str{sum, mean, max} mode, int padding_index=-1, "
        "bool include_last_offset=False) -> (Tensor y, Tensor? bag_of, "
        "Tensor? sizes, Tensor? largest)",
    .family = "embedding",
    .shape = embedding_bag_types,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<EmbeddingBag>(op);
    },
    .work = bag_work<1>,
    .only_overflows = true,
};

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

extern const OpDef kBagWeightsGrad{
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
