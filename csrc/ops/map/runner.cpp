#include "ops/map/runner.h"

#include <algorithm>

#include "base/numbers.h"

namespace popsim::ops {
namespace {

void run_load(const RunContext& context, const MapPlan::Load& load,
              MapBlock block, float* out) {
  load.gather.read(context.data(load.tensor), block.first, block.count, out);
}

void run_step(const MapPlan::Step& step, const std::vector<float*>& values,
              int64_t count) {
  step.function(values[step.out], values[step.operands[0]],
                values[step.operands[1]], values[step.operands[2]], count);
}

}  // namespace

MapRunner::MapRunner(const MapPlan& plan) {
  const MapProgram& program = plan.program;
  const int64_t lines = ceil_div(plan.grid.width, kLineFloats);
  slots_.resize(plan.num_slots * static_cast<size_t>(lines));
  singles_.resize(program.num_values());
  std::copy(program.constants.begin(), program.constants.end(),
            singles_.begin() + static_cast<int64_t>(program.num_inputs));
  for (size_t value = 0; value < program.num_values(); ++value) {
    const auto slot = plan.slots[value];
    values_.push_back(
        slot ? slots_[*slot * static_cast<size_t>(lines)].floats.data()
             : &singles_[value]);
  }
}

void MapRunner::run(const MapPlan& plan, const RunContext& context,
                    int64_t first_block, int64_t last_block) {
  if (first_block == last_block) return;
  const int64_t width = plan.grid.width;
  for (const MapPlan::Load& load : plan.loads_per_run) {
    run_load(context, load, {0, load.per_element ? width : 1},
             values_[load.value]);
  }
  for (const MapPlan::Step& step : plan.steps_per_run) {
    run_step(step, values_, 1);
  }
  for (int64_t i = first_block; i < last_block; ++i) {
    run_block(plan, context, plan.grid.block(i));
  }
}

void MapRunner::run_block(const MapPlan& plan, const RunContext& context,
                          MapBlock block) {
  for (const MapPlan::Load& load : plan.loads) {
    const int64_t count = load.per_element ? block.count : 1;
    run_load(context, load, {block.first, count}, values_[load.value]);
  }
  for (const MapPlan::InPlace& tensor : plan.in_place) {
    values_[tensor.value] =
        context.data<float>(tensor.tensor) + tensor.walk.offset_of(block.first);
  }
  for (const MapPlan::Step& step : plan.steps) {
    run_step(step, values_, step.per_element ? block.count : 1);
  }
  for (const MapPlan::Store& store : plan.stores) {
    store.store(values_[store.value], store.uniform, context.data(store.tensor),
                block.first, block.count);
  }
}

}  // namespace popsim::ops
