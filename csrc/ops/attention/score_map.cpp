#include "ops/attention/score_map.h"

#include <numeric>
#include <utility>

namespace popsim::ops {

class ScoreMap::PieceContext final : public RunContext {
 public:
  explicit PieceContext(void* const* of_tensors) { pointers = of_tensors; }

  const at::Tensor& tensor(graph::TensorId /*id*/) const override {
    throw InternalError("score_map: a map asks for no at::Tensor");
  }
};

ScoreMap::ScoreMap(const OpView& op, const ScoreMapSpec& spec,
                   const dense::Cut& rows)
    : rows_(rows), pointers_(spec.num_inputs + 2) {
  if (spec.code.empty()) return;
  const size_t axes = spec.shape.size() - 2;
  const Shape heads(spec.shape.begin(), spec.shape.end() - 2);
  for (size_t i = 0; i < spec.num_inputs; ++i) {
    const graph::Tensor& tensor = op.input(spec.first_input + i);
    Strides strides =
        broadcast_strides(tensor.shape, tensor.strides, spec.shape);
    const int64_t row_stride = strides[axes];
    strides.resize(axes);
    inputs_.push_back({op.input_id(spec.first_input + i),
                       size_in_bytes(tensor.dtype), StridedWalk(heads, strides),
                       row_stride});
  }
  whole_.emplace(plan_rows(op, spec, rows.length(0)));
  last_.emplace(plan_rows(op, spec, rows.length(rows.count() - 1)));
}

// Plans a map op on a separate graph: the scores, the inputs, the result.
ScoreMap::Sized ScoreMap::plan_rows(const OpView& op, const ScoreMapSpec& spec,
                                    int64_t num_rows) const {
  const size_t axes = spec.shape.size() - 2;
  const Shape shape{num_rows, spec.shape.back()};
  const auto add = [&](graph::Graph& graph, DType dtype,
                       const Strides& strides) {
    return graph.add(graph::Tensor{.name = op.op().name,
                                   .dtype = dtype,
                                   .shape = shape,
                                   .strides = strides});
  };
  graph::Graph graph;
  graph::Op map{.kind = "map", .name = op.op().name};
  map.inputs.push_back(add(graph, DType::kFloat32, contiguous_strides(shape)));
  for (size_t i = 0; i < spec.num_inputs; ++i) {
    const graph::Tensor& tensor = op.input(spec.first_input + i);
    const Strides strides =
        broadcast_strides(tensor.shape, tensor.strides, spec.shape);
    map.inputs.push_back(
        add(graph, tensor.dtype, {strides[axes], strides[axes + 1]}));
  }
  map.outputs.push_back(add(graph, DType::kFloat32, contiguous_strides(shape)));
  map.attributes = {{"code", spec.code},
                    {"constants", spec.constants},
                    {"results", std::vector<int64_t>{spec.result}}};
  MapPlan plan = plan_map(OpView(graph, map));
  MapRunner runner(plan);
  return {std::move(plan), std::move(runner)};
}

void ScoreMap::run(const RunContext& context, int64_t head, int64_t piece,
                   float* scores) {
  if (!whole_) return;
  pointers_.front() = pointers_.back() = scores;
  for (size_t i = 0; i < inputs_.size(); ++i) {
    const Input& input = inputs_[i];
    const int64_t offset =
        input.heads.offset_of(head) + rows_.begin(piece) * input.row_stride;
    pointers_[i + 1] = context.data<char>(input.id) + offset * input.item_bytes;
  }
  Sized& sized = piece + 1 == rows_.count() ? *last_ : *whole_;
  sized.runner.run(sized.plan, PieceContext(pointers_.data()), 0,
                   sized.plan.grid.num_blocks);
}

}  // namespace popsim::ops
