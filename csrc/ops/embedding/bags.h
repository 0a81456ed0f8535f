// Bags of row numbers: the operands of sums, means and maxima of rows, and of
// their gradients.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "ops/math/vec_math.h"
#include "ops/op_def.h"
#include "ops/operands/indices.h"
#include "ops/operands/rows.h"
#include "ops/work.h"
#include "threads/range.h"

namespace popsim::ops {

enum class BagMode : int8_t { kSum, kMean, kMax };

inline BagMode bag_mode(const OpCall& op) {
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

inline void add_scaled(const float* row, float factor, int64_t width,
                       float* sum) {
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

// A row for each number.
template <size_t kIndices>
std::vector<graph::Work> bag_work(const OpView& op) {
  return {
      graph::Elementwise{op.input(kIndices).numel() * op.input(0).shape[1], 2}};
}

}  // namespace popsim::ops
