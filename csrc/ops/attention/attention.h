// The common part of attention and its gradient: the probabilities of one piece
// of a head's rows.
//
//   scores = q @ k (+ initial); logits = map(scores); probabilities =
//   softmax(logits)
//
// They have the same bits as the results of the ops matmul, map and softmax:
// the computation is the same, and values are rounded to the tensors' type at
// the same places.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "ops/attention/head_operand.h"
#include "ops/attention/score_map.h"
#include "threads/tasks.h"

namespace popsim::ops {

// Rounds floats to a dtype, in place.
class Rounding {
 public:
  explicit Rounding(DType dtype);

  void operator()(float* values, int64_t count) const {
    if (function_ != nullptr) {
      function_(values, values, values, values, count);
    }
  }

 private:
  MapFunction function_ = nullptr;  // null for float32
};

// Reads the attributes `prefix`code, `prefix`constants, `prefix`result and
// `prefix`shape.
[[nodiscard]] ScoreMapSpec score_map_spec(const OpCall& op,
                                          const std::string& prefix,
                                          size_t first_input,
                                          size_t num_inputs);

// The shapes of the op: `batch` heads with `rows` queries and `columns` keys.
struct ScoreShape {
  int64_t batch;
  int64_t rows;
  int64_t columns;
};
// `q` and `k`: indices of inputs.
[[nodiscard]] ScoreShape score_shape(const OpCall& op, size_t q, size_t k);

// Throws InternalError if a map's inputs, or the scores that the op starts
// from, do not have the scores' shape.
void check_score_map(const OpCall& op, const ScoreMapSpec& map,
                     const ScoreShape& scores);
void check_initial(const OpCall& op, size_t initial, const ScoreShape& scores);

// A product of the matrices of all heads.
[[nodiscard]] graph::Product head_product(const ScoreShape& scores,
                                          int64_t width, DType dtype);
// The work of a map of the scores and the softmax after it.
[[nodiscard]] graph::Elementwise softmax_work(const OpCall& op,
                                              const ScoreMapSpec& map,
                                              const ScoreShape& scores);

// The score matrix of a head as an operand of products: contiguous or
// transposed.
[[nodiscard]] dense::MatrixStrides score_strides(const ScoreShape& shape);
[[nodiscard]] dense::MatrixStrides transposed_score_strides(
    const ScoreShape& shape);

// Throws InternalError if csrc/dense cannot compute the product.
[[nodiscard]] std::unique_ptr<dense::PieceMatmul> make_product(
    const OpView& op, const dense::MatmulSpec& spec);

// Each thread has one of these.
class Probabilities {
 public:
  // Indices of inputs; the scores start from `initial` if it is given.
  struct Inputs {
    size_t q;
    size_t k;
    size_t initial;
  };

  Probabilities(const OpView& op, const Inputs& inputs, const ScoreMapSpec& map,
                Workspace& workspace);

  [[nodiscard]] const dense::Cut& rows() const { return product_->rows(); }
  [[nodiscard]] size_t workspace_bytes() const {
    return product_->workspace_bytes();
  }
  // Reads the operands of a head; the calls of compute() after it use them.
  void start_head(const RunContext& context, int64_t head, char* workspace);
  void compute(const RunContext& context, int64_t piece, float* out,
               void* product_workspace);

 private:
  struct Initial {
    graph::TensorId id;
    FloatGather gather;
  };

  ScoreShape shape_;
  HeadInput q_;
  HeadInput k_;
  std::unique_ptr<dense::PieceMatmul> product_;
  ScoreMap map_;
  std::optional<Initial> initial_;
  void (*softmax_row_)(const float*, float*, int64_t);
  Rounding round_;
  int64_t head_ = 0;
  const float* queries_ = nullptr;
  const float* keys_ = nullptr;
};

}  // namespace popsim::ops
