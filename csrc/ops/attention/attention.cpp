// Attention, head by head: a matrix product, a map, a softmax and another
// product whose scores and probabilities never leave the caches.
//
// Each thread works on its own pieces of rows. For each piece it computes the
// scores, turns them into probabilities, and multiplies these with the values
// at once. Scores and probabilities are written to memory only if the gradient
// reads them.
#include "ops/attention/attention.h"

#include <vector>

#include "ops/op_def.h"
#include "ops/operands/precision.h"
#include "ops/work.h"

namespace popsim::ops {
namespace {

constexpr size_t kQuery = 0;
constexpr size_t kKey = 1;
constexpr size_t kValue = 2;
constexpr size_t kInitial = 3;
constexpr size_t kOthers = 4;

constexpr size_t kOut = 0;
constexpr size_t kKept = 1;

class AttentionKernel final : public Kernel {
 public:
  explicit AttentionKernel(const OpView& op);
  void run(const RunContext& context) override;

 private:
  struct Share {
    Probabilities probabilities;
    std::unique_ptr<dense::PieceMatmul> product;
  };

  void run_share(const RunContext& context, Share& share, threads::Range units);

  ScoreShape shape_;
  Workspace workspace_;
  HeadInput v_;
  HeadOutput out_;
  std::optional<HeadOutput> kept_;  // the probabilities, for the gradient
  threads::Shares units_;           // pieces of rows of all heads
  std::vector<Share> shares_;
  size_t scores_offset_ = 0;
  size_t product_offset_ = 0;
};

AttentionKernel::AttentionKernel(const OpView& op)
    : shape_(score_shape(op, kQuery, kKey)),
      v_(op, kValue, workspace_),
      out_(op, kOut, workspace_) {
  if (op.has_output(kKept)) {
    kept_.emplace(op, kKept, workspace_);
  }
  const ScoreMapSpec map =
      score_map_spec(op, "", kOthers, op.num_inputs() - kOthers);
  const int bits = significant_bits_in(op, op.input(kValue).dtype);
  const dense::MatmulSpec spec{.m = shape_.rows,
                               .n = v_.columns(),
                               .k = shape_.columns,
                               .a = score_strides(shape_),
                               .b = v_.strides(),
                               .significant_bits = bits};
  const dense::Cut rows = dense::PieceMatmul::cut(shape_.rows, bits);
  const int64_t depth = op.input(kQuery).shape[2];
  units_ = threads::Shares(
      threads::multiplications(shape_.batch * shape_.rows * shape_.columns *
                               (depth + spec.n)),
      shape_.batch * rows.count());
  // The operands of a head have the same place in every thread's workspace.
  const Workspace before = workspace_;
  for (int64_t i = 0; i < units_.limit(); ++i) {
    workspace_ = before;
    shares_.push_back(
        {Probabilities(op, {.q = kQuery, .k = kKey, .initial = kInitial}, map,
                       workspace_),
         make_product(op, spec)});
  }
  const Share& share = shares_.front();
  scores_offset_ = workspace_.add(
      sizeof(float) * static_cast<size_t>(rows.longest() * shape_.columns));
  product_offset_ = workspace_.add(std::max(
      share.probabilities.workspace_bytes(), share.product->workspace_bytes()));
}

void AttentionKernel::run(const RunContext& context) {
  units_.run([&](int64_t share, threads::Range units) {
    run_share(context, shares_[static_cast<size_t>(share)], units);
  });
}

void AttentionKernel::run_share(const RunContext& context, Share& share,
                                threads::Range units) {
  auto& [probabilities, product] = share;
  const dense::Cut& rows = product->rows();
  char* workspace = workspace_.memory();
  void* scratch = workspace + product_offset_;
  const float* values = nullptr;
  for (int64_t unit = units.begin; unit < units.end; ++unit) {
    const int64_t head = unit / rows.count();
    const int64_t piece = unit % rows.count();
    if (unit == units.begin || piece == 0) {
      probabilities.start_head(context, head, workspace);
      values = v_.load(context, head, workspace);
    }
    const int64_t first = rows.begin(piece);
    float* scores = kept_
                        ? kept_->space(context, head, first, workspace)
                        : reinterpret_cast<float*>(workspace + scores_offset_);
    probabilities.compute(context, piece, scores, scratch);
    if (kept_) {
      kept_->store(context, head, first, rows.length(piece), workspace);
    }
    product->run_rows(piece, scores, values,
                      out_.space(context, head, first, workspace), scratch);
    out_.store(context, head, first, rows.length(piece), workspace);
  }
}

std::vector<TensorType> attention_type(const OpCall& op) {
  const ScoreShape shape = score_shape(op, kQuery, kKey);
  const graph::Tensor& v = op.input(kValue);
  op.require_rank(kValue, 3);
  op.require_shape(kValue, {shape.batch, shape.columns, v.shape[2]});
  op.require(
      op.input(kQuery).dtype == v.dtype && op.input(kKey).dtype == v.dtype,
      "q, k and v have the same dtype");
  check_precision(op);
  check_initial(op, kInitial, shape);
  check_score_map(
      op, score_map_spec(op, "", kOthers, op.num_inputs() - kOthers), shape);
  return {{v.dtype, {shape.batch, shape.rows, v.shape[2]}},
          {v.dtype, {shape.batch, shape.rows, shape.columns}}};
}

std::vector<graph::Work> attention_work(const OpView& op) {
  const ScoreShape scores = score_shape(op, kQuery, kKey);
  const graph::Tensor& q = op.input(kQuery);
  const ScoreMapSpec map =
      score_map_spec(op, "", kOthers, op.num_inputs() - kOthers);
  return {head_product(scores, q.shape[2], q.dtype),
          softmax_work(op, map, scores),
          head_product(scores, op.input(kValue).shape[2], q.dtype)};
}

}  // namespace

extern const OpDef kAttention{
    .name = "attention",
    .schema =
        "attention(Tensor{floats} q, Tensor{floats} k, Tensor{floats} v, "
        "Tensor{floats}? initial, Tensor[] others, *, int{1..}[] shape, "
        "str[] code, float[] constants, int{0..} result, bool safe, "
        "str{bf16, tf32}? precision) -> "
        "(Tensor out, Tensor? probabilities)",
    .family = "attention",
    .shape = attention_type,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<AttentionKernel>(op);
    },
    .work = attention_work,
    .layer = true,
};

}  // namespace popsim::ops
