// Reads rows of a table by their numbers, and computes the gradient of the
// table.
#include <cstring>

#include "base/numbers.h"
#include "ops/math/vec_math.h"
#include "ops/op_def.h"
#include "ops/operands/indices.h"
#include "ops/operands/rows.h"
#include "ops/work.h"
#include "threads/tasks.h"

namespace popsim::ops {
namespace {

// The numbers of the table's rows.
class RowNumbers {
 public:
  RowNumbers(const OpView& op, size_t input, int64_t num_rows)
      : numbers_(op, input), num_rows_(num_rows) {}

  // Throws UserError if a number is out of range.
  [[nodiscard]] const std::vector<int64_t>& read(const RunContext& context) {
    const std::vector<int64_t>& rows = numbers_.read(context);
    for (const int64_t row : rows) {
      check_user(row >= 0 && row < num_rows_, "index ", row,
                 " is out of range: the table has ", num_rows_, " rows");
    }
    return rows;
  }

 private:
  IndexInput numbers_;
  int64_t num_rows_;
};

class Embedding final : public Kernel {
 public:
  explicit Embedding(const OpView& op)
      : table_(op.input_id(0)),
        out_(op.output_id(0)),
        row_bytes_(op.input(0).shape[1] * size_in_bytes(op.input(0).dtype)),
        numbers_(op, 1, op.input(0).shape[0]),
        shares_(threads::elements(op.output(0).numel()), op.input(1).numel()) {}

  void run(const RunContext& context) override {
    const std::vector<int64_t>& rows = numbers_.read(context);
    const char* table = context.data<const char>(table_);
    char* out = context.data<char>(out_);
    shares_.run([&](int64_t /*share*/, threads::Range range) {
      for (int64_t i = range.begin; i < range.end; ++i) {
        std::memcpy(out + i * row_bytes_,
                    table + rows[static_cast<size_t>(i)] * row_bytes_,
                    static_cast<size_t>(row_bytes_));
      }
    });
  }

 private:
  graph::TensorId table_;
  graph::TensorId out_;
  int64_t row_bytes_;
  RowNumbers numbers_;
  threads::Shares shares_;
};

// Rows of the gradient are added in the same order on any number of threads:
// each share has its own columns.
class EmbeddingGrad final : public Kernel {
 public:
  explicit EmbeddingGrad(const OpView& op)
      : num_rows_(op.attribute<int64_t>("rows")),
        width_(op.output(0).shape[1]),
        padding_(op.attribute<int64_t>("padding_index")),
        gradient_(op, 0, width_),
        numbers_(op, 1, num_rows_),
        out_(op, 0, width_),
        shares_(threads::elements(op.output(0).numel() + op.input(0).numel()),
                ceil_div(width_, kColumns)),
        scratch_(static_cast<size_t>(shares_.limit())) {
    for (auto& floats : scratch_) {
      floats.resize(static_cast<size_t>(padded(width_)));
    }
    if (!out_.in_place()) {
      sums_.resize(static_cast<size_t>(num_rows_ * width_));
    }
  }

  void run(const RunContext& context) override {
    const std::vector<int64_t>& rows = numbers_.read(context);
    float* sums = out_.space(context, 0, sums_.data());
    shares_.run([&](int64_t share, threads::Range units) {
      const threads::Range columns{units.begin * kColumns,
                                   std::min(units.end * kColumns, width_)};
      add_columns(context, rows, columns, sums,
                  scratch_[static_cast<size_t>(share)].data());
    });
  }

 private:
  static constexpr int64_t kColumns = 32;  // of a unit

  void add_columns(const RunContext& context, const std::vector<int64_t>& rows,
                   threads::Range columns, float* sums, float* scratch) const {
    const int64_t width = columns.end - columns.begin;
    float* first = sums + columns.begin;
    if (width == width_) {
      std::fill_n(first, num_rows_ * width_, 0.0f);
    } else {
      for (int64_t i = 0; i < num_rows_; ++i) {
        std::fill_n(first + i * width_, width, 0.0f);
      }
    }
    for (size_t i = 0; i < rows.size(); ++i) {
      if (rows[i] == padding_) continue;
      const float* gradient = gradient_.read(context, static_cast<int64_t>(i),
                                             columns.begin, width, scratch);
      float* sum = first + rows[i] * width_;
      for_each_vector(width, [&](int64_t k, auto n) {
        store(load(sum + k, n) + load(gradient + k, n), sum + k, n);
      });
    }
    if (out_.in_place()) return;
    for (int64_t i = 0; i < num_rows_; ++i) {
      out_.write(context, i, columns.begin, width, first + i * width_);
    }
  }

  int64_t num_rows_;
  int64_t width_;
  int64_t padding_;  // this row gets no gradient; -1: none
  RowInput gradient_;
  RowNumbers numbers_;
  RowOutput out_;
  threads::Shares shares_;
  std::vector<std::vector<float>> scratch_;  // by share
  std::vector<float> sums_;  // used if the output is not float32
};

std::vector<TensorType> embedding_type(const OpCall& op) {
  op.require_rank(0, 2);
  op.require_contiguous(0);
  Shape shape = op.input(1).shape;
  shape.push_back(op.input(0).shape[1]);
  return {{op.input(0).dtype, shape}};
}

std::vector<TensorType> embedding_grad_type(const OpCall& op) {
  Shape shape = op.input(1).shape;
  op.require_rank(0, shape.size() + 1);
  const int64_t width = op.input(0).shape.back();
  shape.push_back(width);
  op.require_shape(0, shape);
  return {{op.input(0).dtype, {op.attribute<int64_t>("rows"), width}}};
}

// Counts only the rows that are read.
std::vector<graph::Work> embedding_work(const OpView& op) {
  return {graph::Move{2 * op.output(0).bytes() + op.input(1).bytes()}};
}

std::vector<graph::Work> embedding_grad_work(const OpView& op) {
  return {graph::Elementwise{op.input(0).numel(), 1}};
}

}  // namespace

extern const OpDef kEmbedding{
    .name = "embedding",
    .schema = "embedding(Tensor table, Tensor{indices} indices) -> Tensor",
    .family = "embedding",
    .shape = embedding_type,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<Embedding>(op);
    },
    .work = embedding_work,
    .cheap = true,
    .exact = true,
};

extern const OpDef kEmbeddingGrad{
    .name = "embedding_grad",
    .schema =
        "embedding_grad(Tensor{floats} gradient, Tensor{indices} indices, *, "
        "int{1..} rows, int padding_index) -> Tensor",
    .family = "embedding",
    .shape = embedding_grad_type,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<EmbeddingGrad>(op);
    },
    .work = embedding_grad_work,
    .only_overflows = true,
};

}  // namespace popsim::ops
