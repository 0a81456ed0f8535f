// Sums, means and maxima of rows of a table, one for each bag of row numbers.
#include <algorithm>
#include <array>

#include "ops/embedding/bags.h"
#include "threads/tasks.h"

namespace popsim::ops {
namespace {

class EmbeddingBag final : public Kernel {
 public:
  explicit EmbeddingBag(const OpView& op)
      : mode_(bag_mode(op)),
        width_(op.input(0).shape[1]),
        bags_(op, 1, 2, num_bags(op), op.input(0).shape[0]),
        table_(op, 0, width_),
        table_id_(op.input_id(0)),
        load_(load_floats(op.input(0).dtype)),
        is_adjacent_(op.input(0).contiguous()),
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
    if (table_.in_place() || is_adjacent_) {
      for (; column + kTogether <= width_; column += kTogether) {
        add_block(context, range, column, scratch, y);
      }
    }
    std::fill(y + column, y + width_, 0.0f);
    int64_t size = 0;
    for (int64_t i = range.begin; i < range.end; ++i) {
      if (!bags_.counts(i)) continue;
      ++size;
      if (column == width_) continue;
      const float* row =
          part_of(context, bags_.row(i), column, width_ - column, scratch);
      add_scaled(row, weights_.of(i), width_ - column, y + column);
    }
    if (mode_ == BagMode::kSum || size < 2) return;
    const auto divisor = static_cast<float>(size);
    for (int64_t k = 0; k < width_; ++k) y[k] /= divisor;
  }

  // Some elements of a row of the table, in place or in `scratch`.
  const float* part_of(const RunContext& context, int64_t row, int64_t first,
                       int64_t count, float* scratch) const {
    if (table_.in_place() || !is_adjacent_) {
      return table_.read(context, row, first, count, scratch);
    }
    load_(context.data(table_id_), row * width_ + first, 1, count, scratch);
    return scratch;
  }

  // Adds up some columns, whose sums stay in registers.
  void add_block(const RunContext& context, threads::Range range,
                 int64_t column, float* scratch, float* y) const {
    std::array<Vec, 4> sums{Vec(0.0f), Vec(0.0f), Vec(0.0f), Vec(0.0f)};
    for (int64_t i = range.begin; i < range.end; ++i) {
      if (!bags_.counts(i)) continue;
      const float* row =
          part_of(context, bags_.row(i), column, kTogether, scratch);
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
  // The elements of a table in the order of its rows are converted directly.
  graph::TensorId table_id_;
  LoadFloats load_;
  bool is_adjacent_;
  SampleWeights weights_;
  RowOutput y_;
  graph::TensorId bag_of_;
  graph::TensorId sizes_;
  graph::TensorId largest_;
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

}  // namespace popsim::ops
