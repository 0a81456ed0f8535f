// Sums, means and extremes over any set of axes.
//
// The computation is float32 for all dtypes; sums are pairwise, over blocks
// that do not depend on the number of threads.
#include <numeric>

#include "base/numbers.h"
#include "ops/math/reduce_functions.h"
#include "ops/op_def.h"
#include "ops/operands/float_conversion.h"
#include "ops/operands/float_operand.h"
#include "ops/reduce/plan.h"
#include "ops/work.h"
#include "threads/tasks.h"

namespace popsim::ops {
namespace {

constexpr int64_t kRowTile = 1024;  // number of results of one piece of work
constexpr int64_t kLoadedRows = 8;  // number of rows converted at a time
constexpr int64_t kRowsInSequence = 64;
// The number of elements of a long row that are added at once.
constexpr int64_t kRunElements = 2048;
constexpr int64_t kRunsInSequence = 8;
constexpr int64_t kResultBlock = 256;
constexpr int64_t kFoldBelow = 128;

// How many short, adjacent rows are processed as one long row.
int64_t rows_to_fold(const ReducePlan& plan) {
  if (!plan.keeps_width || !plan.dense_rows || plan.width >= kFoldBelow) {
    return 1;
  }
  int64_t fold = 16 / std::gcd(plan.width, int64_t{16});
  while (fold * plan.width < kFoldBelow) fold *= 2;
  if (fold * plan.width > kRowTile) fold = kRowTile / plan.width;
  return std::min(fold, plan.rows_per_result);
}

class Reduce final : public Kernel {
 public:
  explicit Reduce(const OpView& op);
  void run(const RunContext& context) override;

 private:
  // The memory of one task.
  struct Task {
    const RunContext& context;
    float* loaded;   // converted elements
    float* results;  // a tile, and one more for each level of pairs
  };
  // A piece of the output: part of a row of it, or one element.
  struct Piece {
    int64_t in;     // offset of its first row in the input
    int64_t first;  // along the row
    int64_t width;
  };

  void plan_tasks(int64_t numel);
  void run_task(const RunContext& context, int64_t task, threads::Range range);
  void combine_parts(const RunContext& context, int64_t piece) const;
  [[nodiscard]] Piece piece(int64_t index) const;
  void reduce(const Task& task, const Piece& piece, threads::Range units) const;
  void reduce_rows(const Task& task, const Piece& piece, int64_t first,
                   int64_t count, float* out) const;
  void reduce_folded(const Task& task, const Piece& piece, threads::Range units,
                     float* out) const;
  void add_rows(const Task& task, const Piece& piece, int64_t offset,
                int64_t stride, int64_t count, float* out) const;
  [[nodiscard]] float reduce_runs(const Task& task, const Piece& piece,
                                  int64_t first, int64_t count) const;
  void run_values(const Task& task, int64_t offset, int64_t stride,
                  int64_t count, int64_t width, float* out) const;
  void reduce_single_runs(const Task& task, threads::Range pieces) const;
  void store_results(const RunContext& context, int64_t first, int64_t count,
                     float* results) const;
  void finish(const RunContext& context, int64_t piece, float* results) const;

  ReducePlan plan_;
  const ReduceFunctions* functions_;
  graph::TensorId in_;
  graph::TensorId out_;
  LoadFloats load_;
  StoreFloats store_;
  bool in_place_;  // float32, and adjacent in memory
  float divisor_ = 1.0f;

  int64_t fold_ = 1;
  int64_t tile_ = 1;
  int64_t tiles_per_row_ = 1;
  int64_t runs_per_row_ = 1;
  int64_t num_pieces_ = 1;
  int64_t num_units_ = 1;  // rows (folded ones count as one) or runs, by piece
  threads::Tasks tasks_;
  int64_t num_parts_ = 1;      // > 1: tasks share the units, not the pieces
  int64_t loaded_floats_ = 0;  // elements that a task has converted
  std::vector<std::vector<float>> scratch_;  // by task
};

const ReduceFunctions* functions_of(const OpView& op) {
  const auto& kind = op.attribute<std::string>("function");
  const ReduceFunctions* found =
      find_reduce_functions(kind == "mean" ? "sum" : kind);
  check_internal(found != nullptr, "reduce '", op.op().name,
                 "': unknown function '", kind, "'");
  return found;
}

Reduce::Reduce(const OpView& op)
    : plan_(
          plan_reduce(op.input(0), op.attribute<std::vector<int64_t>>("axes"))),
      functions_(functions_of(op)),
      in_(op.input_id(0)),
      out_(op.output_id(0)),
      load_(load_floats(op.input(0).dtype)),
      store_(store_floats(op.output(0).dtype)),
      in_place_(op.input(0).dtype == DType::kFloat32 && plan_.stride == 1) {
  const int64_t numel = op.input(0).numel();
  if (op.attribute<std::string>("function") == "mean") {
    divisor_ = static_cast<float>(numel / op.output(0).numel());
  }
  plan_tasks(numel);
}

void Reduce::plan_tasks(int64_t numel) {
  if (plan_.keeps_width) {
    fold_ = rows_to_fold(plan_);
    tile_ = std::min(plan_.width, kRowTile);
    tiles_per_row_ = ceil_div(plan_.width, tile_);
    num_pieces_ = plan_.num_results * tiles_per_row_;
    num_units_ = std::max<int64_t>(plan_.rows_per_result / fold_, 1);
  } else {
    runs_per_row_ = ceil_div(plan_.width, kRunElements);
    num_pieces_ = plan_.num_results;
    num_units_ = plan_.rows_per_result * runs_per_row_;
  }
  // The elements are read but not written.
  const threads::Work work = threads::elements(numel / 2);
  tasks_ = threads::Tasks(work, num_pieces_);
  if (num_pieces_ < std::min<int64_t>(threads::Tasks(work, numel).count(), 8)) {
    tasks_ = threads::Tasks(work, num_units_);
    num_parts_ = tasks_.count();
  }
  const int64_t results = num_parts_ > 1 ? num_pieces_ * tile_ : 0;
  int64_t levels = 2;
  for (int64_t rows = kRowsInSequence; rows < num_units_; rows *= 2) ++levels;
  if (!in_place_) {
    loaded_floats_ = plan_.keeps_width ? kLoadedRows * tile_ * fold_
                                       : std::min(plan_.width, kRunElements);
  }
  const int64_t pairs =
      plan_.keeps_width ? levels * tile_ * fold_ : kResultBlock;
  scratch_.resize(static_cast<size_t>(tasks_.count()));
  for (auto& floats : scratch_)
    floats.resize(static_cast<size_t>(results + pairs + loaded_floats_));
}

void Reduce::run(const RunContext& context) {
  tasks_.run([&](int64_t task, threads::Range range) {
    run_task(context, task, range);
  });
  if (num_parts_ == 1) return;
  for (int64_t i = 0; i < num_pieces_; ++i) combine_parts(context, i);
}

void Reduce::run_task(const RunContext& context, int64_t task,
                      threads::Range range) {
  std::vector<float>& scratch = scratch_[static_cast<size_t>(task)];
  const bool shares = num_parts_ > 1;
  const threads::Range pieces = shares ? threads::Range{0, num_pieces_} : range;
  const threads::Range units = shares ? range : threads::Range{0, num_units_};
  float* kept = scratch.data();
  float* work = kept + (shares ? num_pieces_ * tile_ : 0);
  float* loaded = scratch.data() + scratch.size() - loaded_floats_;
  const Task with{context, loaded, work};
  if (!plan_.keeps_width && num_units_ == 1) {
    reduce_single_runs(with, pieces);
    return;
  }
  for (int64_t i = pieces.begin; i < pieces.end; ++i) {
    const Piece reduced = piece(i);
    reduce(with, reduced, units);
    if (shares) {
      std::copy_n(work, reduced.width, kept + i * tile_);
    } else {
      finish(context, i, work);
    }
  }
}

void Reduce::combine_parts(const RunContext& context, int64_t index) const {
  std::array<float, kRowTile> sum;
  const Piece combined = piece(index);
  std::fill_n(sum.begin(), combined.width, functions_->identity);
  for (const auto& floats : scratch_) {
    functions_->rows(floats.data() + index * tile_, 0, 1, sum.data(),
                     combined.width);
  }
  finish(context, index, sum.data());
}

Reduce::Piece Reduce::piece(int64_t index) const {
  const int64_t first = index % tiles_per_row_ * tile_;
  const int64_t in = plan_.results_in.offset_of(index / tiles_per_row_);
  const int64_t width =
      plan_.keeps_width ? std::min(tile_, plan_.width - first) : 1;
  return {in + first * plan_.stride, first, width};
}

void Reduce::reduce(const Task& task, const Piece& piece,
                    threads::Range units) const {
  const int64_t count = units.end - units.begin;
  if (!plan_.keeps_width) {
    task.results[0] = reduce_runs(task, piece, units.begin, count);
  } else if (fold_ > 1) {
    reduce_folded(task, piece, units, task.results);
  } else {
    reduce_rows(task, piece, units.begin, count, task.results);
  }
}

// Pairwise: rounding errors grow with the logarithm of the number of rows.
void Reduce::reduce_rows(const Task& task, const Piece& piece, int64_t first,
                         int64_t count, float* out) const {
  if (count > kRowsInSequence) {
    int64_t half = kRowsInSequence;
    while (2 * half < count) half *= 2;
    reduce_rows(task, piece, first, half, out);
    float* other = out + tile_ * fold_;
    reduce_rows(task, piece, first + half, count - half, other);
    functions_->rows(other, 0, 1, out, piece.width);
    return;
  }
  std::fill_n(out, piece.width, functions_->identity);
  if (fold_ > 1) {
    const int64_t stride = fold_ * plan_.width;
    add_rows(task, piece, first * stride, stride, count, out);
    return;
  }
  plan_.rows.for_each_run(first, count,
                          [&](int64_t offset, int64_t stride, int64_t rows) {
                            add_rows(task, piece, offset, stride, rows, out);
                          });
}

void Reduce::reduce_folded(const Task& task, const Piece& piece,
                           threads::Range units, float* out) const {
  const int64_t width = plan_.width;
  const Piece wide{piece.in, 0, fold_ * width};
  reduce_rows(task, wide, units.begin, units.end - units.begin, out);
  const int64_t rest = plan_.rows_per_result - num_units_ * fold_;
  if (units.end == num_units_ && rest > 0) {
    const Piece last{piece.in, 0, rest * width};
    add_rows(task, last, num_units_ * fold_ * width, 0, 1, out);
  }
  for (int64_t parts = fold_; parts > 1;) {
    const int64_t half = (parts + 1) / 2;
    functions_->rows(out + half * width, 0, 1, out, (parts - half) * width);
    parts = half;
  }
}

void Reduce::add_rows(const Task& task, const Piece& piece, int64_t offset,
                      int64_t stride, int64_t count, float* out) const {
  offset += piece.in;
  if (in_place_) {
    functions_->rows(task.context.data<float>(in_) + offset, stride, count, out,
                     piece.width);
    return;
  }
  const void* source = task.context.data(in_);
  for (int64_t row = 0; row < count; row += kLoadedRows) {
    const int64_t rows = std::min(kLoadedRows, count - row);
    for (int64_t i = 0; i < rows; ++i) {
      load_(source, offset + (row + i) * stride, plan_.stride, piece.width,
            task.loaded + i * piece.width);
    }
    functions_->rows(task.loaded, piece.width, rows, out, piece.width);
  }
}

float Reduce::reduce_runs(const Task& task, const Piece& piece, int64_t first,
                          int64_t count) const {
  if (count > kRunsInSequence) {
    int64_t half = kRunsInSequence;
    while (2 * half < count) half *= 2;
    return functions_->combine(
        reduce_runs(task, piece, first, half),
        reduce_runs(task, piece, first + half, count - half));
  }
  float result = functions_->identity;
  std::array<float, kRunsInSequence> values;
  if (runs_per_row_ == 1) {
    float* out = values.data();
    plan_.rows.for_each_run(
        first, count, [&](int64_t offset, int64_t stride, int64_t rows) {
          run_values(task, piece.in + offset, stride, rows, plan_.width, out);
          out += rows;
        });
  } else {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = (first + i) / runs_per_row_;
      const int64_t begin = (first + i) % runs_per_row_ * kRunElements;
      run_values(
          task, piece.in + plan_.rows.offset_of(row) + begin * plan_.stride, 0,
          1, std::min(kRunElements, plan_.width - begin), values.data() + i);
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    result = functions_->combine(result, values[static_cast<size_t>(i)]);
  }
  return result;
}

void Reduce::run_values(const Task& task, int64_t offset, int64_t stride,
                        int64_t count, int64_t width, float* out) const {
  if (in_place_) {
    functions_->runs(task.context.data<float>(in_) + offset, stride, count,
                     width, out);
    return;
  }
  const void* source = task.context.data(in_);
  for (int64_t i = 0; i < count; ++i) {
    load_(source, offset + i * stride, plan_.stride, width, task.loaded);
    functions_->runs(task.loaded, 0, 1, width, out + i);
  }
}

// Each result is one run: the results are computed in blocks.
void Reduce::reduce_single_runs(const Task& task, threads::Range pieces) const {
  plan_.results_in.for_each_run(
      pieces.begin, pieces.end - pieces.begin,
      [&](int64_t offset, int64_t stride, int64_t count) {
        for (int64_t i = 0; i < count; i += kResultBlock) {
          const int64_t block = std::min(kResultBlock, count - i);
          run_values(task, offset + i * stride, stride, block, plan_.width,
                     task.results);
          store_results(task.context, pieces.begin, block, task.results);
          pieces.begin += block;
        }
      });
}

void Reduce::store_results(const RunContext& context, int64_t first,
                           int64_t count, float* results) const {
  if (divisor_ != 1.0f) {
    for (int64_t i = 0; i < count; ++i) results[i] /= divisor_;
  }
  void* out = context.data(out_);
  const float* from = results;
  plan_.results_out.for_each_run(
      first, count, [&](int64_t offset, int64_t stride, int64_t run) {
        if (stride == 1) {
          store_(from, false, out, offset, run);
        } else {
          for (int64_t i = 0; i < run; ++i) {
            store_(from + i, false, out, offset + i * stride, 1);
          }
        }
        from += run;
      });
}

void Reduce::finish(const RunContext& context, int64_t index,
                    float* results) const {
  const Piece done = piece(index);
  if (divisor_ != 1.0f) {
    for (int64_t i = 0; i < done.width; ++i) results[i] /= divisor_;
  }
  const int64_t stride = plan_.keeps_width ? plan_.result_stride : 1;
  const int64_t offset =
      plan_.results_out.offset_of(index / tiles_per_row_) + done.first * stride;
  void* out = context.data(out_);
  if (stride == 1) {
    store_(results, false, out, offset, done.width);
    return;
  }
  for (int64_t i = 0; i < done.width; ++i) {
    store_(results + i, false, out, offset + i * stride, 1);
  }
}

std::vector<TensorType> reduced_type(const OpCall& op) {
  const Shape& shape = op.input(0).shape;
  const auto& axes = op.attribute<std::vector<int64_t>>("axes");
  const auto rank = static_cast<int64_t>(shape.size());
  for (const int64_t axis : axes) {
    op.require(axis < rank && std::ranges::count(axes, axis) == 1,
               "axes are axes of the input, each at most once");
  }
  op.require(op.input(0).numel() > 0, "the input is not empty");
  const bool keep = op.attribute<bool>("keepdim");
  Shape result;
  for (size_t i = 0; i < shape.size(); ++i) {
    const bool reduced = std::find(axes.begin(), axes.end(),
                                   static_cast<int64_t>(i)) != axes.end();
    if (!reduced || keep) result.push_back(reduced ? 1 : shape[i]);
  }
  return {{dtype_from_name(op.attribute<std::string>("dtype")), result}};
}

std::vector<graph::Work> reduce_work(const OpView& op) {
  return {graph::Reduce{op.input(0).numel(), op.output(0).numel()}};
}

}  // namespace

extern const OpDef kReduce{
    .name = "reduce",
    .schema =
        "reduce(Tensor{floats} x, *, str{amax, amin, mean, sum} function, "
        "int{0..}[] axes, bool keepdim, dtype{floats} dtype) -> Tensor",
    .family = "reduce",
    .shape = reduced_type,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<Reduce>(op);
    },
    .work = reduce_work,
    .only_overflows = true,
};

}  // namespace popsim::ops
