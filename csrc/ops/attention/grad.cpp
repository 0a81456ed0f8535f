// The gradient of attention, head by head. The probabilities of a piece of rows
// are computed again, or read if forward kept them; then, while they are in the
// caches,
//
//   for_v += probabilities^T @ gradient
//   scores' gradient = map(softmax_grad(gradient @ v^T, probabilities))
//   for_q  = scores' gradient @ k
//   for_k += q^T @ scores' gradient
//
// Each product is cut like the batched product that it replaces
// (dense/piece_matmul.h), so the sums have the same order.
#include <utility>
#include <vector>

#include "ops/attention/attention.h"
#include "ops/math/softmax_rows.h"
#include "ops/op_def.h"
#include "ops/operands/precision.h"
#include "ops/work.h"

namespace popsim::ops {
namespace {

// The inputs contain either the probabilities or the tensors to compute them
// from.
constexpr size_t kKept = 0;
constexpr size_t kQuery = 1;
constexpr size_t kKey = 2;
constexpr size_t kInitial = 3;
constexpr size_t kGradient = 4;   // [batch, rows, width], for the scores
constexpr size_t kValues = 5;     // [batch, width, columns]
constexpr size_t kKeys = 6;       // [batch, columns, depth], for for_q
constexpr size_t kQueries = 7;    // [batch, depth, rows], for for_k
constexpr size_t kGradients = 8;  // [batch, rows, width], for for_v
constexpr size_t kOthers = 9;

constexpr size_t kForQuery = 0;
constexpr size_t kForKey = 1;
constexpr size_t kForValue = 2;

ScoreShape shape_of(const OpCall& op) {
  if (!op.has_input(kKept)) return score_shape(op, kQuery, kKey);
  op.require_rank(kKept, 3);
  const Shape& shape = op.input(kKept).shape;
  return {shape[0], shape[1], shape[2]};
}

DType dtype_of(const OpCall& op) {
  return op.input(op.has_input(kKept) ? kKept : kQuery).dtype;
}

// One of the gradients: the product of the scores and another operand.
struct Result {
  std::optional<HeadInput> operand;
  std::optional<HeadOutput> out;

  void plan(const OpView& op, size_t input, size_t output,
            Workspace& workspace) {
    if (!op.has_output(output)) return;
    operand.emplace(op, input, workspace);
    out.emplace(op, output, workspace);
  }
};

class AttentionGradKernel final : public Kernel {
 public:
  explicit AttentionGradKernel(const OpView& op);
  void run(const RunContext& context) override;

 private:
  struct Share {
    // Absent if the probabilities are kept.
    std::optional<Probabilities> probabilities;
    ScoreMap map;
    // Null if no op reads the result.
    std::unique_ptr<dense::PieceMatmul> for_scores;
    std::unique_ptr<dense::PieceMatmul> for_q;
    std::unique_ptr<dense::PieceMatmul> for_k;
    std::unique_ptr<dense::PieceMatmul> for_v;
  };
  // The addresses of a head's operands and results.
  struct Head {
    int64_t index;
    char* workspace;
    float* probabilities;  // memory for the probabilities of a piece
    float* gradient;       // of the scores of a piece
    void* scratch;
    const float* kept = nullptr;
    const float* from_above = nullptr;
    const float* values = nullptr;
    const float* keys = nullptr;
    const float* queries = nullptr;
    const float* gradients = nullptr;
  };

  [[nodiscard]] Share make_share(const OpView& op, Workspace& workspace) const;
  [[nodiscard]] size_t scratch_bytes(const Share& share) const;
  [[nodiscard]] const float* probabilities(const RunContext& context,
                                           Share& share, const Head& head,
                                           int64_t piece) const;
  void run_head(const RunContext& context, Share& share, int64_t index);
  void run_piece(const RunContext& context, Share& share, const Head& head,
                 int64_t piece);
  void score_gradient(const RunContext& context, Share& share, const Head& head,
                      int64_t piece, const float* probabilities);

  ScoreShape shape_;
  dense::Cut rows_;
  Rounding round_;
  Workspace workspace_;
  std::optional<HeadInput> kept_;
  std::optional<HeadInput> gradient_;  // absent if only for_v is wanted
  std::optional<HeadInput> values_;    // the same
  Result q_;
  Result k_;
  Result v_;
  threads::Shares heads_;
  std::vector<Share> shares_;
  size_t probabilities_offset_ = 0;
  size_t gradient_offset_ = 0;
  size_t scratch_offset_ = 0;
};

AttentionGradKernel::AttentionGradKernel(const OpView& op)
    : shape_(shape_of(op)),
      rows_(dense::PieceMatmul::cut(shape_.rows,
                                    significant_bits_in(op, dtype_of(op)))),
      round_(dtype_of(op)) {
  if (op.has_input(kKept)) kept_.emplace(op, kKept, workspace_);
  q_.plan(op, kKeys, kForQuery, workspace_);
  k_.plan(op, kQueries, kForKey, workspace_);
  v_.plan(op, kGradients, kForValue, workspace_);
  if (q_.out || k_.out) {
    gradient_.emplace(op, kGradient, workspace_);
    values_.emplace(op, kValues, workspace_);
  }
  // There are at least two products.
  const int64_t width = op.input(gradient_ ? kGradient : kGradients).shape[2];
  heads_ =
      threads::Shares(threads::multiplications(2 * shape_.batch * shape_.rows *
                                               shape_.columns * width),
                      shape_.batch);
  // The operands of a head have the same place in every thread's workspace.
  const Workspace before = workspace_;
  for (int64_t i = 0; i < heads_.limit(); ++i) {
    workspace_ = before;
    shares_.push_back(make_share(op, workspace_));
  }
  const size_t piece_bytes =
      sizeof(float) * static_cast<size_t>(rows_.longest() * shape_.columns);
  probabilities_offset_ = workspace_.add(piece_bytes);
  gradient_offset_ = workspace_.add(piece_bytes);
  scratch_offset_ = workspace_.add(scratch_bytes(shares_.front()));
}

AttentionGradKernel::Share AttentionGradKernel::make_share(
    const OpView& op, Workspace& workspace) const {
  const auto num_others =
      static_cast<size_t>(op.attribute<int64_t>("num_others"));
  const size_t grad_others = kOthers + num_others;
  Share share{std::nullopt,
              ScoreMap(op,
                       score_map_spec(op, "grad_", grad_others,
                                      op.num_inputs() - grad_others),
                       rows_),
              nullptr,
              nullptr,
              nullptr,
              nullptr};
  if (!kept_) {
    share.probabilities.emplace(
        op, Probabilities::Inputs{.q = kQuery, .k = kKey, .initial = kInitial},
        score_map_spec(op, "", kOthers, num_others), workspace);
  }
  const auto make = [&](int64_t m, int64_t n, int64_t k,
                        const dense::MatrixStrides& a,
                        const dense::MatrixStrides& b) {
    return make_product(
        op, {.m = m,
             .n = n,
             .k = k,
             .a = a,
             .b = b,
             .significant_bits = significant_bits_in(op, dtype_of(op))});
  };
  const int64_t rows = shape_.rows;
  const int64_t columns = shape_.columns;
  const dense::MatrixStrides scores = score_strides(shape_);
  if (gradient_) {
    share.for_scores = make(rows, columns, gradient_->columns(),
                            gradient_->strides(), values_->strides());
  }
  if (q_.out) {
    share.for_q = make(rows, q_.operand->columns(), columns, scores,
                       q_.operand->strides());
  }
  if (k_.out) {
    share.for_k =
        make(k_.operand->rows(), columns, rows, k_.operand->strides(), scores);
  }
  if (v_.out) {
    share.for_v = make(columns, v_.operand->columns(), rows,
                       transposed_score_strides(shape_), v_.operand->strides());
  }
  return share;
}

size_t AttentionGradKernel::scratch_bytes(const Share& share) const {
  size_t bytes =
      share.probabilities ? share.probabilities->workspace_bytes() : 0;
  for (const auto* product :
       {&share.for_scores, &share.for_q, &share.for_k, &share.for_v}) {
    if (*product == nullptr) continue;
    bytes = std::max(bytes, (*product)->workspace_bytes());
  }
  return bytes;
}

void AttentionGradKernel::run(const RunContext& context) {
  heads_.run([&](int64_t share, threads::Range heads) {
    for (int64_t head = heads.begin; head < heads.end; ++head) {
      run_head(context, shares_[static_cast<size_t>(share)], head);
    }
  });
}

void AttentionGradKernel::run_head(const RunContext& context, Share& share,
                                   int64_t index) {
  char* workspace = workspace_.memory();
  Head head{.index = index,
            .workspace = workspace,
            .probabilities =
                reinterpret_cast<float*>(workspace + probabilities_offset_),
            .gradient = reinterpret_cast<float*>(workspace + gradient_offset_),
            .scratch = workspace + scratch_offset_};
  if (share.probabilities) {
    share.probabilities->start_head(context, index, workspace);
  }
  if (kept_) head.kept = kept_->load(context, index, workspace);
  if (gradient_) {
    head.from_above = gradient_->load(context, index, workspace);
    head.values = values_->load(context, index, workspace);
  }
  if (q_.out) head.keys = q_.operand->load(context, index, workspace);
  if (k_.out) head.queries = k_.operand->load(context, index, workspace);
  if (v_.out) head.gradients = v_.operand->load(context, index, workspace);
  for (int64_t piece = 0; piece < rows_.count(); ++piece) {
    run_piece(context, share, head, piece);
  }
  if (q_.out) q_.out->store(context, index, 0, shape_.rows, workspace);
  if (k_.out) {
    k_.out->store(context, index, 0, k_.operand->rows(), workspace);
  }
  if (v_.out) v_.out->store(context, index, 0, shape_.columns, workspace);
}

const float* AttentionGradKernel::probabilities(const RunContext& context,
                                                Share& share, const Head& head,
                                                int64_t piece) const {
  if (!kept_) {
    share.probabilities->compute(context, piece, head.probabilities,
                                 head.scratch);
    return head.probabilities;
  }
  return head.kept + rows_.begin(piece) * shape_.columns;
}

void AttentionGradKernel::run_piece(const RunContext& context, Share& share,
                                    const Head& head, int64_t piece) {
  const int64_t first = rows_.begin(piece);
  const auto space = [&](const Result& result, int64_t row) {
    return result.out->space(context, head.index, row, head.workspace);
  };
  const float* given = probabilities(context, share, head, piece);
  if (v_.out) {
    share.for_v->run_depth(piece, given,
                           head.gradients + first * v_.operand->strides().row,
                           space(v_, 0), head.scratch);
  }
  if (!gradient_) return;
  score_gradient(context, share, head, piece, given);
  if (q_.out) {
    share.for_q->run_rows(piece, head.gradient, head.keys, space(q_, first),
                          head.scratch);
  }
  if (k_.out) {
    share.for_k->run_depth(piece,
                           head.queries + first * k_.operand->strides().column,
                           head.gradient, space(k_, 0), head.scratch);
  }
}

void AttentionGradKernel::score_gradient(const RunContext& context,
                                         Share& share, const Head& head,
                                         int64_t piece,
                                         const float* probabilities) {
  const int64_t columns = shape_.columns;
  const int64_t num_rows = rows_.length(piece);
  float* gradient = head.gradient;
  share.for_scores->run_rows(
      piece, head.from_above + rows_.begin(piece) * gradient_->strides().row,
      head.values, gradient, head.scratch);
  round_(gradient, num_rows * columns);
  for (int64_t row = 0; row < num_rows; ++row) {
    float* values = gradient + row * columns;
    grad_row<SoftmaxGrad>(values, probabilities + row * columns, values,
                          columns);
  }
  round_(gradient, num_rows * columns);
  share.map.run(context, head.index, piece, gradient);
  round_(gradient, num_rows * columns);
}

// The size of the one other axis of an operand [batch, ...] whose axis `axis`
// has `size` elements.
int64_t free_size(const OpCall& op, size_t input, int64_t batch, size_t axis,
                  int64_t size) {
  op.require_rank(input, 3);
  Shape expected = op.input(input).shape;
  expected[0] = batch;
  expected[axis] = size;
  op.require_shape(input, expected);
  op.require(op.input(input).dtype == dtype_of(op),
             "the operands of products have the same dtype");
  return expected[3 - axis];
}

void check_maps(const OpCall& op, const ScoreShape& shape) {
  const auto num_others =
      static_cast<size_t>(op.attribute<int64_t>("num_others"));
  const size_t grad_others = kOthers + num_others;
  check_initial(op, kInitial, shape);
  check_score_map(op, score_map_spec(op, "", kOthers, num_others), shape);
  check_score_map(
      op,
      score_map_spec(op, "grad_", grad_others, op.num_inputs() - grad_others),
      shape);
}

std::vector<TensorType> gradient_types(const OpCall& op) {
  const ScoreShape shape = shape_of(op);
  const DType dtype = dtype_of(op);
  op.require(op.has_input(kKept) || op.input(kKey).dtype == dtype,
             "q and k have the same dtype");
  check_precision(op);
  check_maps(op, shape);
  const auto [batch, rows, columns] = shape;
  std::vector<TensorType> types(3, TensorType::none());
  if (op.has_input(kGradients)) {
    const int64_t width = free_size(op, kGradients, batch, 1, rows);
    types[kForValue] = {dtype, {batch, columns, width}};
  }
  op.require(op.has_input(kGradient) == op.has_input(kValues),
             "gradient and values are both given or both left out");
  if (!op.has_input(kGradient)) return types;
  const int64_t width = free_size(op, kGradient, batch, 1, rows);
  op.require(width == free_size(op, kValues, batch, 2, columns),
             "gradient and values can be multiplied");
  if (op.has_input(kKeys)) {
    const int64_t depth = free_size(op, kKeys, batch, 1, columns);
    types[kForQuery] = {dtype, {batch, rows, depth}};
  }
  if (op.has_input(kQueries)) {
    const int64_t depth = free_size(op, kQueries, batch, 2, rows);
    types[kForKey] = {dtype, {batch, depth, columns}};
  }
  return types;
}

std::vector<graph::Work> gradient_work(const OpView& op) {
  const ScoreShape scores = shape_of(op);
  const auto num_others =
      static_cast<size_t>(op.attribute<int64_t>("num_others"));
  const size_t grad_others = kOthers + num_others;
  std::vector<graph::Work> work{softmax_work(
      op,
      score_map_spec(op, "grad_", grad_others, op.num_inputs() - grad_others),
      scores)};
  if (!op.has_input(kKept)) {
    work.emplace_back(
        softmax_work(op, score_map_spec(op, "", kOthers, num_others), scores));
  }
  // For each operand, the axis of its width.
  for (const auto& [input, axis] : {std::pair<size_t, size_t>{kQuery, 2},
                                    {kGradient, 2},
                                    {kKeys, 2},
                                    {kQueries, 1},
                                    {kGradients, 2}}) {
    if (!op.has_input(input)) continue;
    work.emplace_back(
        head_product(scores, op.input(input).shape[axis], dtype_of(op)));
  }
  return work;
}

}  // namespace

extern const OpDef kAttentionGrad{
    .name = "attention_grad",
    .schema =
        "attention_grad(Tensor{floats}? probabilities, Tensor{floats}? q, "
        "Tensor{floats}? k, Tensor{floats}? initial, "
        "Tensor{floats}? gradient, Tensor{floats}? values, "
        "Tensor{floats}? keys, Tensor{floats}? queries, "
        "Tensor{floats}? gradients, Tensor[num_others] others, "
        "Tensor[] grad_others, *, int{0..} num_others, int{1..}[] shape, "
        "str[] code, float[] constants, int{0..} result, bool safe, "
        "str[] grad_code, float[] grad_constants, int{0..} grad_result, "
        "int{1..}[] grad_shape, str{bf16, tf32}? precision) -> "
        "(Tensor? for_q, Tensor? for_k, Tensor? for_v)",
    .family = "attention",
    .shape = gradient_types,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<AttentionGradKernel>(op);
    },
    .work = gradient_work,
    .layer = true,
};

}  // namespace popsim::ops
