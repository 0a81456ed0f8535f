#include <algorithm>

#include "ops/attention/attention.h"
#include "ops/math/softmax_rows.h"
#include "ops/operands/precision.h"

namespace popsim::ops {
namespace {

dense::MatmulSpec scores_spec(const HeadInput& q, const HeadInput& k,
                              bool initial, int significant_bits) {
  return {.m = q.rows(),
          .n = k.columns(),
          .k = q.columns(),
          .a = q.strides(),
          .b = k.strides(),
          .beta = initial ? 1.0F : 0.0F,
          .significant_bits = significant_bits};
}

}  // namespace

Rounding::Rounding(DType dtype) {
  if (dtype == DType::kFloat32) return;
  const auto* const name = dtype == DType::kFloat16 ? "half" : "bfloat16";
  function_ = find_map_instruction(name)->functions[0];
}

ScoreMapSpec score_map_spec(const OpCall& op, const std::string& prefix,
                            size_t first_input, size_t num_inputs) {
  return {.code = op.attribute<std::vector<std::string>>(prefix + "code"),
          .constants = op.attribute<std::vector<double>>(prefix + "constants"),
          .result = op.attribute<int64_t>(prefix + "result"),
          .shape = op.attribute<std::vector<int64_t>>(prefix + "shape"),
          .first_input = first_input,
          .num_inputs = num_inputs};
}

ScoreShape score_shape(const OpCall& op, size_t q, size_t k) {
  const Shape& left = op.input(q).shape;
  const Shape& right = op.input(k).shape;
  op.require(left.size() == 3 && right.size() == 3 && left[0] == right[0] &&
                 left[2] == right[1],
             "inputs ", q, " and ", k, " can be multiplied");
  return {left[0], left[1], right[2]};
}

void check_score_map(const OpCall& op, const ScoreMapSpec& map,
                     const ScoreShape& scores) {
  const Shape& shape = map.shape;
  const size_t rank = shape.size();
  op.require(
      rank >= 3 && is_valid_shape(shape) &&
          num_elements(shape) == scores.batch * scores.rows * scores.columns &&
          shape[rank - 2] == scores.rows && shape[rank - 1] == scores.columns,
      "the shape of a map is that of the scores, (", scores.batch, ", ",
      scores.rows, ", ", scores.columns, ")");
  for (size_t i = 0; i < map.num_inputs; ++i) {
    op.require_broadcasts(map.first_input + i, shape);
  }
}

void check_initial(const OpCall& op, size_t initial, const ScoreShape& scores) {
  if (!op.has_input(initial)) return;
  op.require_broadcasts(initial, {scores.batch, scores.rows, scores.columns});
}

graph::Product head_product(const ScoreShape& scores, int64_t width,
                            DType dtype) {
  return {scores.batch, scores.rows, scores.columns, width, dtype};
}

graph::Elementwise softmax_work(const OpCall& op, const ScoreMapSpec& map,
                                const ScoreShape& scores) {
  constexpr int64_t kSoftmaxCost = 20;
  const MapProgram program =
      parse_map_program(op.op().name, map.num_inputs + 1, map.code,
                        map.constants, std::span(&map.result, 1));
  return {scores.batch * scores.rows * scores.columns,
          kSoftmaxCost + program.cost()};
}

dense::MatrixStrides score_strides(const ScoreShape& shape) {
  Matrices m{.rows = shape.rows,
             .columns = shape.columns,
             .strides = {.row = shape.columns, .column = 1}};
  normalise(m);
  return m.strides;
}

dense::MatrixStrides transposed_score_strides(const ScoreShape& shape) {
  Matrices m{.rows = shape.columns,
             .columns = shape.rows,
             .strides = {.row = 1, .column = shape.columns}};
  normalise(m);
  return m.strides;
}

std::unique_ptr<dense::PieceMatmul> make_product(
    const OpView& op, const dense::MatmulSpec& spec) {
  auto product = dense::PieceMatmul::create(spec);
  check_internal(product != nullptr, op.op().kind, " '", op.op().name,
                 "': no code for a product of ", spec.m, " by ", spec.k, " by ",
                 spec.n);
  return product;
}

Probabilities::Probabilities(const OpView& op, const Inputs& inputs,
                             const ScoreMapSpec& map, Workspace& workspace)
    : shape_(score_shape(op, inputs.q, inputs.k)),
      q_(op, inputs.q, workspace),
      k_(op, inputs.k, workspace),
      product_(make_product(
          op, scores_spec(q_, k_, op.has_input(inputs.initial),
                          significant_bits_in(op, op.input(inputs.q).dtype)))),
      map_(op, map, product_->rows()),
      softmax_row_(op.attribute<bool>("safe") ? Softmax<true>::row
                                              : Softmax<false>::row),
      round_(op.input(inputs.q).dtype) {
  if (!op.has_input(inputs.initial)) return;
  const graph::Tensor& tensor = op.input(inputs.initial);
  const Shape shape{shape_.batch, shape_.rows, shape_.columns};
  initial_.emplace(Initial{
      op.input_id(inputs.initial),
      FloatGather(tensor.dtype, shape,
                  broadcast_strides(tensor.shape, tensor.strides, shape))});
}

void Probabilities::start_head(const RunContext& context, int64_t head,
                               char* workspace) {
  head_ = head;
  queries_ = q_.load(context, head, workspace);
  keys_ = k_.load(context, head, workspace);
}

void Probabilities::compute(const RunContext& context, int64_t piece,
                            float* out, void* product_workspace) {
  const int64_t first = rows().begin(piece);
  const int64_t num_rows = rows().length(piece);
  const int64_t count = num_rows * shape_.columns;
  if (initial_) {
    initial_->gather.read(context.data(initial_->id),
                          (head_ * shape_.rows + first) * shape_.columns, count,
                          out);
  }
  product_->run_rows(piece, queries_ + first * q_.strides().row, keys_, out,
                     product_workspace);
  round_(out, count);
  map_.run(context, head_, piece, out);
  round_(out, count);
  for (int64_t row = 0; row < num_rows; ++row) {
    float* values = out + row * shape_.columns;
    softmax_row_(values, values, shape_.columns);
  }
  round_(out, count);
}

}  // namespace popsim::ops
