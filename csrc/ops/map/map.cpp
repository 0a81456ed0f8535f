// One elementwise codelet: a short sequence of instructions without jumps, for
// tensors of one shape. A chain of elementwise ops then reads and writes memory
// only once.
#include <algorithm>

#include "ops/map/plan.h"
#include "ops/map/runner.h"
#include "ops/op_def.h"
#include "ops/work.h"
#include "threads/tasks.h"

namespace popsim::ops {
namespace {

class MapKernel final : public Kernel {
 public:
  explicit MapKernel(MapPlan plan);
  void run(const RunContext& context) override;

 private:
  MapPlan plan_;
  threads::Shares shares_;          // of blocks
  std::vector<MapRunner> runners_;  // by share
};

MapKernel::MapKernel(MapPlan plan)
    : plan_(std::move(plan)),
      shares_(threads::additions(plan_.grid.num_blocks * plan_.grid.width *
                                 plan_.cost),
              plan_.grid.num_blocks) {
  for (int64_t i = 0; i < shares_.limit(); ++i) runners_.emplace_back(plan_);
}

void MapKernel::run(const RunContext& context) {
  shares_.run([&](int64_t share, threads::Range blocks) {
    runners_[static_cast<size_t>(share)].run(plan_, context, blocks.begin,
                                             blocks.end);
  });
}

Shape broadcast_shape(const OpCall& op) {
  Shape shape;
  for (size_t i = 0; i < op.num_inputs(); ++i) {
    const Shape& input = op.input(i).shape;
    if (input.size() > shape.size()) {
      shape.insert(shape.begin(), input.size() - shape.size(), 1);
    }
    const size_t missing = shape.size() - input.size();
    for (size_t k = 0; k < input.size(); ++k) {
      int64_t& size = shape[missing + k];
      op.require(size == 1 || input[k] == 1 || size == input[k], "input ", i,
                 " broadcasts with the others");
      if (size == 1) size = input[k];
    }
  }
  return shape;
}

std::vector<TensorType> map_types(const OpCall& op) {
  const Shape shape = op.has_attribute("shape")
                          ? op.attribute<std::vector<int64_t>>("shape")
                          : broadcast_shape(op);
  op.require(is_valid_shape(shape),
             "the output's shape is valid: ", to_string(shape));
  for (size_t i = 0; i < op.num_inputs(); ++i) {
    op.require_broadcasts(i, shape);
    op.require(!is_complex(op.input(i).dtype), "input ", i, " is real");
  }
  std::vector<TensorType> types;
  for (const std::string& dtype :
       op.attribute<std::vector<std::string>>("dtypes")) {
    types.push_back({dtype_from_name(dtype), shape});
  }
  return types;
}

std::vector<graph::Work> map_work(const OpView& op) {
  const MapProgram program =
      parse_map_program(op.op().name, op.num_inputs(),
                        op.attribute<std::vector<std::string>>("code"),
                        op.attribute<std::vector<double>>("constants"),
                        op.attribute<std::vector<int64_t>>("results"));
  return {graph::Elementwise{op.output(0).numel(), program.cost()}};
}

}  // namespace

extern const OpDef kMap{
    .name = "map",
    .schema =
        "map(Tensor[] inputs, *, str[] code, float[] constants, "
        "int{0..}[] results, dtype{float32, float16, bfloat16, bool}[] dtypes, "
        "int{0..}[]? shape) -> Tensor[]",
    .family = "map",
    .shape = map_types,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<MapKernel>(plan_map(op));
    },
    .work = map_work,
    .reuses_input = true,
    .cheap = true,
    .elementwise = true,
};

}  // namespace popsim::ops
