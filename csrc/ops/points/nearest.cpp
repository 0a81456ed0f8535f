// Finds for each row of one table the nearest row of another, by the sum of the
// squares of their differences.
//
// A row is compared with the candidates that have the same batch number: the
// batch numbers ascend in both tables, so these candidates follow each other.
// Rows are processed in chunks with their columns stored separately, so a
// vector holds one value of several rows. Candidates are processed in blocks
// that stay in the cache. Each distance is added up separately, in the order of
// the columns.
#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <optional>
#include <span>

#include "base/numbers.h"
#include "ops/countable.h"
#include "ops/math/vec_math.h"
#include "ops/operands/float_operand.h"
#include "ops/operands/indices.h"
#include "ops/operands/rows.h"
#include "threads/tasks.h"

namespace popsim::ops {
namespace {

constexpr int64_t kChunk = 128;         // rows
constexpr int64_t kStride = 128 + 64;   // with room for a vector after them
constexpr int64_t kBlockFloats = 4096;  // of candidates
constexpr int64_t kAtOnce = 4;          // candidates that share the loaded rows
constexpr int64_t kDifferenceCost = 3;  // in additions
static_assert(kStride - kChunk >= kLanes);

// The number of differences between all rows and all their candidates.
int64_t num_differences(const OpView& op) {
  return countable(static_cast<double>(op.input(0).numel()) *
                   static_cast<double>(op.input(1).shape[0]));
}

// The bits of a row's number as lanes of floats, which are only moved and never
// used as numbers.
Vec number_lanes(int64_t number) {
  return Vec(std::bit_cast<float>(static_cast<int32_t>(number)));
}

// The batch numbers of the rows of both tables.
class Batches {
 public:
  explicit Batches(const OpView& op) : rows_(op, 2), candidates_(op, 3) {}

  // Throws UserError if the batch numbers do not ascend, or if a batch has rows
  // but no candidates.
  void read(const RunContext& context) {
    of_rows_ = rows_.read(context);
    of_candidates_ = candidates_.read(context);
    check_ascends("batch_x", of_rows_);
    check_ascends("batch_y", of_candidates_);
    for (size_t i = 0; i < of_rows_.size(); ++i) {
      if (i > 0 && of_rows_[i] == of_rows_[i - 1]) continue;
      check_user(std::ranges::binary_search(of_candidates_, of_rows_[i]),
                 "nearest: row ", i, " of x has the batch number ", of_rows_[i],
                 ", which no row of y has");
    }
  }

  // The end of the rows that have the batch number of row `first`; at most
  // `end`.
  [[nodiscard]] int64_t end_of(int64_t first, int64_t end) const {
    const int64_t number = of_rows_[static_cast<size_t>(first)];
    int64_t last = first + 1;
    while (last < end && of_rows_[static_cast<size_t>(last)] == number) ++last;
    return last;
  }
  [[nodiscard]] threads::Range candidates_of(int64_t row) const {
    const auto found = std::ranges::equal_range(
        of_candidates_, of_rows_[static_cast<size_t>(row)]);
    return {found.begin() - of_candidates_.begin(),
            found.end() - of_candidates_.begin()};
  }

 private:
  static void check_ascends(const char* name, std::span<const int64_t> given) {
    const auto wrong = std::ranges::is_sorted_until(given);
    if (wrong == given.end()) return;
    check_user(false, "nearest: ", name, " must ascend, but ", *wrong,
               " follows ", *(wrong - 1), " in row ", wrong - given.begin());
  }

  IndexInput rows_;
  IndexInput candidates_;
  std::span<const int64_t> of_rows_;
  std::span<const int64_t> of_candidates_;
};

class Nearest final : public Kernel {
 public:
  explicit Nearest(const OpView& op)
      : num_rows_(op.input(0).shape[0]),
        num_candidates_(op.input(1).shape[0]),
        width_(op.input(0).shape[1]),
        block_(std::max(kAtOnce, kBlockFloats / std::max<int64_t>(width_, 1))),
        rows_(op, 0, width_),
        candidates_(op.input_id(1), op.input(1), workspace_),
        out_(op.output_id(0)),
        shares_(threads::additions(kDifferenceCost * num_differences(op)),
                ceil_div(num_rows_, kChunk)) {
    if (op.has_input(2)) batches_.emplace(op);
    const Scratch scratch{
        std::vector<float>(static_cast<size_t>(padded(width_))),
        std::vector<float>(static_cast<size_t>(width_ * kStride)),
        std::vector<float>(kStride), std::vector<float>(kStride)};
    scratch_.assign(static_cast<size_t>(shares_.limit()), scratch);
  }

  void run(const RunContext& context) override {
    if (batches_) batches_->read(context);
    const float* candidates = candidates_.load(context, workspace_.memory());
    shares_.run([&](int64_t share, threads::Range chunks) {
      Scratch& scratch = scratch_[static_cast<size_t>(share)];
      for (int64_t i = chunks.begin; i < chunks.end; ++i) {
        run_chunk(context, i * kChunk, candidates, scratch);
      }
    });
  }

 private:
  struct Scratch {
    std::vector<float> row;
    std::vector<float> columns;  // of a chunk's rows, kStride apart
    std::vector<float> least;    // smallest distance so far, for each row
    std::vector<float> nearest;  // the candidate with that distance, as bits
  };

  void run_chunk(const RunContext& context, int64_t first,
                 const float* candidates, Scratch& scratch) const {
    const int64_t end = std::min(first + kChunk, num_rows_);
    for (int64_t i = first; i < end; ++i) {
      const float* row = rows_.read(context, i, scratch.row.data());
      float* column = scratch.columns.data() + (i - first);
      for (int64_t k = 0; k < width_; ++k) column[k * kStride] = row[k];
    }
    int64_t last = end;
    for (int64_t i = first; i < end; i = last) {
      threads::Range among{0, num_candidates_};
      if (batches_) {
        last = batches_->end_of(i, end);
        among = batches_->candidates_of(i);
      }
      search({i - first, last - first}, among, candidates, scratch);
    }
    auto* out = context.data<int64_t>(out_) + first;
    for (int64_t i = 0; i < end - first; ++i) {
      out[i] = std::bit_cast<int32_t>(scratch.nearest[static_cast<size_t>(i)]);
    }
  }

  // Finds the nearest one of some candidates for some rows of a chunk.
  void search(threads::Range rows, threads::Range among,
              const float* candidates, Scratch& scratch) const {
    float* least = scratch.least.data();
    float* nearest = scratch.nearest.data();
    // Rows with a NaN or infinite distance to all candidates keep the first
    // candidate.
    std::fill_n(least + rows.begin, rows.size(),
                std::numeric_limits<float>::infinity());
    std::fill_n(nearest + rows.begin, rows.size(),
                std::bit_cast<float>(static_cast<int32_t>(among.begin)));
    for (int64_t j = among.begin; j < among.end; j += block_) {
      const threads::Range block{j, std::min(j + block_, among.end)};
      // The last vector also writes after the rows; that memory is not
      // initialised yet.
      for (int64_t i = rows.begin; i < rows.end; i += kLanes) {
        compare(scratch.columns.data() + i, block, candidates, least + i,
                nearest + i);
      }
    }
  }

  // Compares a vector of rows with a block of candidates.
  void compare(const float* columns, threads::Range block,
               const float* candidates, float* least, float* nearest) const {
    Vec shortest = Vec::loadu(least);
    Vec number = Vec::loadu(nearest);
    const auto take = [&](const Vec& distance, int64_t candidate) {
      const Vec is_less = distance < shortest;
      shortest = Vec::blendv(shortest, distance, is_less);
      number = Vec::blendv(number, number_lanes(candidate), is_less);
    };
    int64_t j = block.begin;
    for (; j + kAtOnce <= block.end; j += kAtOnce) {
      const float* values = candidates + j * width_;
      std::array<Vec, kAtOnce> sums;
      sums.fill(Vec(0.0f));
      for (int64_t k = 0; k < width_; ++k) {
        const Vec x = Vec::loadu(columns + k * kStride);
        for (int64_t u = 0; u < kAtOnce; ++u) {
          const Vec difference = x - Vec(values[u * width_ + k]);
          Vec& sum = sums[static_cast<size_t>(u)];
          sum = sum + difference * difference;
        }
      }
      for (int64_t u = 0; u < kAtOnce; ++u) {
        take(sums[static_cast<size_t>(u)], j + u);
      }
    }
    for (; j < block.end; ++j) {
      Vec sum(0.0f);
      for (int64_t k = 0; k < width_; ++k) {
        const Vec difference =
            Vec::loadu(columns + k * kStride) - Vec(candidates[j * width_ + k]);
        sum = sum + difference * difference;
      }
      take(sum, j);
    }
    shortest.store(least);
    number.store(nearest);
  }

  int64_t num_rows_;
  int64_t num_candidates_;
  int64_t width_;
  int64_t block_;  // candidates
  Workspace workspace_;
  RowInput rows_;
  FloatInput candidates_;
  graph::TensorId out_;
  std::optional<Batches> batches_;
  threads::Shares shares_;
  std::vector<Scratch> scratch_;  // by share
};

std::vector<TensorType> nearest_type(const OpCall& op) {
  op.require_rank(0, 2);
  op.require_rank(1, 2);
  const Shape& rows = op.input(0).shape;
  const Shape& candidates = op.input(1).shape;
  op.require(rows[1] == candidates[1],
             "x and y have the same number of columns");
  op.require(op.input(1).numel() > 0, "the candidates are not empty");
  op.require(candidates[0] <= std::numeric_limits<int32_t>::max(),
             "the numbers of candidates fit into 32 bits");
  op.require(op.has_input(2) == op.has_input(3),
             "both tables have batch numbers, or neither has");
  if (op.has_input(2)) {
    op.require_shape(2, {rows[0]});
    op.require_shape(3, {candidates[0]});
  }
  return {{DType::kInt64, {rows[0]}}};
}

std::vector<graph::Work> nearest_work(const OpView& op) {
  return {graph::Elementwise{num_differences(op), kDifferenceCost}};
}

}  // namespace

extern const OpDef kNearest{
    .name = "nearest",
    .schema =
        "nearest(Tensor{floats} x, Tensor{floats} y, Tensor{indices}? batch_x, "
        "Tensor{indices}? batch_y) -> Tensor",
    .family = "points",
    .shape = nearest_type,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<Nearest>(op);
    },
    .work = nearest_work,
};

}  // namespace popsim::ops
