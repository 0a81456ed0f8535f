// One elementwise codelet: a small straight-line expression over tensors of
// one shape, so that a chain of elementwise ops reads and writes memory once.
#include <ATen/Parallel.h>

#include <algorithm>

#include "ops/entries.h"
#include "ops/map_plan.h"

namespace popsim::ops {
namespace {

// Work, in additions, that is worth waking another thread for.
constexpr int64_t kMinTaskCost = 1 << 18;
constexpr int64_t kLineFloats = 16;

struct alignas(64) Line {
  std::array<float, kLineFloats> floats;
};

// What one thread works with.
struct Task {
  std::vector<Line> slots;
  std::vector<float> singles;  // by value, for values that are one float
  std::vector<float*> values;  // by value: where it is
  int64_t first_block = 0;
  int64_t last_block = 0;
};

class MapKernel final : public Kernel {
 public:
  explicit MapKernel(MapPlan plan);
  void run(const RunContext& context) override;

 private:
  [[nodiscard]] Task make_task(int64_t index, int64_t num_tasks) const;
  void run_task(const RunContext& context, Task& task) const;
  void run_block(const RunContext& context, Task& task, MapBlock block) const;

  MapPlan plan_;
  std::vector<Task> tasks_;
};

MapKernel::MapKernel(MapPlan plan) : plan_(std::move(plan)) {
  const MapGrid& grid = plan_.grid;
  const int64_t cost = grid.num_blocks * grid.width * plan_.cost;
  const int64_t num_tasks = std::clamp<int64_t>(
      std::min(cost / kMinTaskCost, grid.num_blocks), 1, at::get_num_threads());
  for (int64_t i = 0; i < num_tasks; ++i) {
    tasks_.push_back(make_task(i, num_tasks));
  }
}

Task MapKernel::make_task(int64_t index, int64_t num_tasks) const {
  const MapProgram& program = plan_.program;
  const int64_t lines = (plan_.grid.width + kLineFloats - 1) / kLineFloats;
  Task task;
  task.slots.resize(plan_.num_slots * static_cast<size_t>(lines));
  task.singles.resize(program.num_values());
  std::copy(program.constants.begin(), program.constants.end(),
            task.singles.begin() + static_cast<int64_t>(program.num_inputs));
  for (size_t value = 0; value < program.num_values(); ++value) {
    const auto slot = plan_.slots[value];
    task.values.push_back(
        slot ? task.slots[*slot * static_cast<size_t>(lines)].floats.data()
             : &task.singles[value]);
  }
  task.first_block = plan_.grid.num_blocks * index / num_tasks;
  task.last_block = plan_.grid.num_blocks * (index + 1) / num_tasks;
  return task;
}

void MapKernel::run(const RunContext& context) {
  if (tasks_.size() == 1) {
    run_task(context, tasks_.front());
    return;
  }
  const auto num_tasks = static_cast<int64_t>(tasks_.size());
  at::parallel_for(0, num_tasks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      run_task(context, tasks_[static_cast<size_t>(i)]);
    }
  });
}

void run_load(const RunContext& context, const MapPlan::Load& load,
              MapBlock block, float* out) {
  const void* source = context.data(load.tensor);
  load.walk.for_each_run(block.first, block.count,
                         [&](int64_t offset, int64_t stride, int64_t count) {
                           load.load(source, offset, stride, count, out);
                           out += count;
                         });
}

void run_step(const MapPlan::Step& step, const std::vector<float*>& values,
              int64_t count) {
  step.function(values[step.out], values[step.operands[0]],
                values[step.operands[1]], values[step.operands[2]], count);
}

void MapKernel::run_task(const RunContext& context, Task& task) const {
  if (task.first_block == task.last_block) return;
  const int64_t width = plan_.grid.width;
  for (const MapPlan::Load& load : plan_.loads_per_run) {
    run_load(context, load, {0, load.per_element ? width : 1},
             task.values[load.value]);
  }
  for (const MapPlan::Step& step : plan_.steps_per_run) {
    run_step(step, task.values, 1);
  }
  for (int64_t i = task.first_block; i < task.last_block; ++i) {
    run_block(context, task, plan_.grid.block(i));
  }
}

void MapKernel::run_block(const RunContext& context, Task& task,
                          MapBlock block) const {
  for (const MapPlan::Load& load : plan_.loads) {
    const int64_t count = load.per_element ? block.count : 1;
    run_load(context, load, {block.first, count}, task.values[load.value]);
  }
  for (const MapPlan::InPlace& tensor : plan_.in_place) {
    task.values[tensor.value] =
        context.data<float>(tensor.tensor) + tensor.walk.offset_of(block.first);
  }
  for (const MapPlan::Step& step : plan_.steps) {
    run_step(step, task.values, step.per_element ? block.count : 1);
  }
  for (const MapPlan::Store& store : plan_.stores) {
    store.store(task.values[store.value], store.uniform,
                context.data(store.tensor), block.first, block.count);
  }
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

const OpDef kMap{
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
