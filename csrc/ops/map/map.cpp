// One elementwise codelet: a small straight-line expression over tensors of
// one shape, so that a chain of elementwise ops reads and writes memory once.
#include <ATen/Parallel.h>

#include <algorithm>

#include "ops/map/plan.h"
#include "ops/map/runner.h"
#include "ops/op_def.h"
#include "ops/tasks.h"

namespace popsim::ops {
namespace {

// Work, in additions, that is worth waking another thread for.
constexpr int64_t kMinTaskCost = 1 << 18;
class MapKernel final : public Kernel {
 public:
  explicit MapKernel(MapPlan plan);
  void run(const RunContext& context) override;

 private:
  MapPlan plan_;
  std::vector<MapRunner> runners_;  // by task
};

MapKernel::MapKernel(MapPlan plan) : plan_(std::move(plan)) {
  const MapGrid& grid = plan_.grid;
  const int64_t cost = grid.num_blocks * grid.width * plan_.cost;
  const int64_t num_tasks = std::clamp<int64_t>(
      std::min(cost / kMinTaskCost, grid.num_blocks), 1, at::get_num_threads());
  for (int64_t i = 0; i < num_tasks; ++i) runners_.emplace_back(plan_);
}

void MapKernel::run(const RunContext& context) {
  const auto num_tasks = static_cast<int64_t>(runners_.size());
  run_tasks(num_tasks, [&](int64_t task) {
    const TaskRange blocks = task_range(task, num_tasks, plan_.grid.num_blocks);
    runners_[static_cast<size_t>(task)].run(plan_, context, blocks.begin,
                                            blocks.end);
  });
}

Shape broadcast_shape(const OpView& op) {
  Shape shape;
  for (size_t i = 0; i < op.num_inputs(); ++i) {
    const Shape& input = op.input(i).shape;
    if (input.size() > shape.size()) {
      shape.insert(shape.begin(), input.size() - shape.size(), 1);
    }
    const size_t missing = shape.size() - input.size();
    for (size_t k = 0; k < input.size(); ++k) {
      int64_t& size = shape[missing + k];
      check_internal(size == 1 || input[k] == 1 || size == input[k], "map '",
                     op.op().name, "': input ", i, " ", to_string(input),
                     " does not broadcast with the others");
      if (size == 1) size = input[k];
    }
  }
  return shape;
}

std::vector<TensorType> map_types(const OpView& op) {
  const Shape shape = op.has_attribute("shape")
                          ? op.attribute<std::vector<int64_t>>("shape")
                          : broadcast_shape(op);
  std::vector<TensorType> types;
  for (const std::string& dtype :
       op.attribute<std::vector<std::string>>("dtypes")) {
    types.push_back({dtype_from_name(dtype), shape});
  }
  return types;
}

}  // namespace

extern const OpDef kMap{
    .name = "map",
    .schema =
        "map(Tensor[] inputs, *, str[] code, float[] constants, "
        "int[] results, str[] dtypes, int[]? shape=None) -> Tensor[]",
    .shape = map_types,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<MapKernel>(plan_map(op));
    },
    .reuses_input = true,
};

}  // namespace popsim::ops
