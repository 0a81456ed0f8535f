#include "ops/map/plan.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace popsim::ops {
namespace {

// L1 holds a few slots of this number of floats, and the inputs and outputs.
constexpr int64_t kBlockElements = 1024;
constexpr int64_t kVectorElements = 16;

// How the instructions get an input.
enum class Access : int8_t { kLoadPerRun, kLoadPerBlock, kInPlace };

struct InputPlan {
  Strides strides;  // over the output's shape
  MapRate rate = MapRate::kPerElement;
  Access access = Access::kLoadPerBlock;
};

class Planner {
 public:
  explicit Planner(const OpView& op);
  [[nodiscard]] MapPlan finish();

 private:
  void check_outputs() const;
  void plan_grid();
  void plan_input(size_t i, const MergedAxes& axes, bool whole_rows);
  void plan_rates();
  void plan_in_place_results();
  void plan_last_uses();
  void assign_slots();
  void emit_inputs();
  void emit_steps();
  void emit_stores();
  [[nodiscard]] bool is_result(size_t value) const;

  const OpView& op_;
  const Shape& shape_;
  MapPlan plan_;
  std::vector<InputPlan> inputs_;
  std::vector<MapRate> rates_;     // by value
  std::vector<size_t> last_uses_;  // by value: the last statement that reads it
  std::vector<bool> written_;  // by output: an instruction writes it directly
  std::vector<bool> needs_no_slot_;  // by value
};

std::vector<std::string> code_of(const OpView& op) {
  return op.attribute<std::vector<std::string>>("code");
}

Planner::Planner(const OpView& op) : op_(op), shape_(op.output(0).shape) {
  plan_.program =
      parse_map_program(op.op().name, op.num_inputs(), code_of(op),
                        op.attribute<std::vector<double>>("constants"),
                        op.attribute<std::vector<int64_t>>("results"));
  inputs_.resize(op.num_inputs());
  for (size_t i = 0; i < inputs_.size(); ++i) {
    const graph::Tensor& input = op.input(i);
    inputs_[i].strides = broadcast_strides(input.shape, input.strides, shape_);
  }
}

MapPlan Planner::finish() {
  check_outputs();
  plan_grid();
  plan_rates();
  plan_in_place_results();
  plan_last_uses();
  assign_slots();
  emit_inputs();
  emit_steps();
  emit_stores();
  return std::move(plan_);
}

void Planner::check_outputs() const {
  check_internal(plan_.program.results.size() == op_.num_outputs(), "map '",
                 op_.op().name, "' has ", op_.num_outputs(), " outputs and ",
                 plan_.program.results.size(), " results");
}

// A row is a sequence of elements in which every input has one stride. Short
// rows share a block, and long ones are divided.
void Planner::plan_grid() {
  std::vector<Strides> strides{contiguous_strides(shape_)};
  for (const InputPlan& input : inputs_) strides.push_back(input.strides);
  const MergedAxes axes = merge_axes(shape_, strides);
  const int64_t numel = num_elements(shape_);
  const int64_t row = axes.sizes.back();
  MapGrid& grid = plan_.grid;
  if (numel == 0) return;
  int64_t rows_per_block = std::min(kBlockElements / row, numel / row);
  const bool whole_rows = rows_per_block > 1;
  if (whole_rows) {
    // Blocks are whole vectors, so only the last block has a partial vector.
    const int64_t step = kVectorElements / std::gcd(row, kVectorElements);
    if (rows_per_block > step) rows_per_block -= rows_per_block % step;
    grid.unit = numel;
    grid.width = rows_per_block * row;
  } else {
    grid.unit = row;
    grid.width = std::min(row, kBlockElements);
  }
  const int64_t pieces = (grid.unit + grid.width - 1) / grid.width;
  grid.num_blocks = numel / grid.unit * pieces;
  for (size_t i = 0; i < inputs_.size(); ++i) plan_input(i, axes, whole_rows);
}

void Planner::plan_input(size_t i, const MergedAxes& axes, bool whole_rows) {
  InputPlan& input = inputs_[i];
  const Strides& strides = axes.strides[i + 1];
  const bool is_float = op_.input(i).dtype == DType::kFloat32;
  const bool repeats = std::all_of(strides.begin(), strides.end() - 1,
                                   [](int64_t stride) { return stride == 0; });
  if (repeats && strides.back() == 0) {
    input.rate = MapRate::kPerRun;
    input.access = Access::kLoadPerRun;
  } else if (!whole_rows && strides.back() == 0) {
    input.rate = MapRate::kPerBlock;
  } else if (whole_rows && repeats && axes.sizes.size() > 1) {
    input.access = Access::kLoadPerRun;
  } else if (is_float && (strides == axes.strides[0] ||
                          (!whole_rows && strides.back() == 1))) {
    // If there are several outputs, an earlier one may overwrite it before it
    // is copied to a later one.
    const bool copied = op_.num_outputs() > 1 && is_result(i);
    if (!copied) input.access = Access::kInPlace;
  }
}

bool Planner::is_result(size_t value) const {
  const std::vector<size_t>& results = plan_.program.results;
  return std::find(results.begin(), results.end(), value) != results.end();
}

void Planner::plan_rates() {
  const MapProgram& program = plan_.program;
  rates_.assign(program.num_values(), MapRate::kPerRun);
  for (size_t i = 0; i < inputs_.size(); ++i) rates_[i] = inputs_[i].rate;
  for (size_t i = 0; i < program.code.size(); ++i) {
    const MapStatement& statement = program.code[i];
    MapRate& rate = rates_[program.value_of(i)];
    for (size_t k = 0; k < statement.instruction->arity; ++k) {
      rate = std::max(rate, rates_[statement.operands[k]]);
    }
  }
}

// The instruction that computes a float32 output writes it directly, unless an
// input that may share its memory is still read afterwards.
void Planner::plan_in_place_results() {
  const MapProgram& program = plan_.program;
  size_t last_read = 0;  // last statement that reads an input in place
  for (size_t i = 0; i < program.code.size(); ++i) {
    const MapStatement& statement = program.code[i];
    for (size_t k = 0; k < statement.instruction->arity; ++k) {
      const size_t value = statement.operands[k];
      if (value < inputs_.size() && inputs_[value].access == Access::kInPlace) {
        last_read = i;
      }
    }
  }
  written_.assign(op_.num_outputs(), false);
  needs_no_slot_.assign(program.num_values(), false);
  for (size_t o = 0; o < op_.num_outputs(); ++o) {
    const size_t value = program.results[o];
    if (value < program.value_of(last_read) || needs_no_slot_[value] ||
        rates_[value] != MapRate::kPerElement ||
        op_.output(o).dtype != DType::kFloat32) {
      continue;
    }
    written_[o] = true;
    needs_no_slot_[value] = true;
    const Strides strides = contiguous_strides(shape_);
    plan_.in_place.push_back(
        {value, op_.output_id(o), StridedWalk(shape_, strides)});
  }
}

void Planner::plan_last_uses() {
  const MapProgram& program = plan_.program;
  last_uses_.resize(program.num_values());
  for (size_t i = 0; i < program.code.size(); ++i) {
    last_uses_[program.value_of(i)] = i;
    const MapStatement& statement = program.code[i];
    for (size_t k = 0; k < statement.instruction->arity; ++k) {
      last_uses_[statement.operands[k]] = i;
    }
  }
  for (const size_t value : program.results) {
    last_uses_[value] = program.code.size();
  }
  for (size_t i = 0; i < inputs_.size(); ++i) {
    if (inputs_[i].access == Access::kLoadPerRun) {
      last_uses_[i] = program.code.size();
    }
    if (inputs_[i].access == Access::kInPlace) needs_no_slot_[i] = true;
  }
}

void Planner::assign_slots() {
  const MapProgram& program = plan_.program;
  plan_.slots.resize(program.num_values());
  std::vector<size_t> free_slots;
  const auto take = [&](size_t value) {
    if (rates_[value] != MapRate::kPerElement || needs_no_slot_[value]) return;
    if (free_slots.empty()) free_slots.push_back(plan_.num_slots++);
    plan_.slots[value] = free_slots.back();
    free_slots.pop_back();
  };
  const auto release_after = [&](size_t value, size_t statement) {
    if (plan_.slots[value] && last_uses_[value] == statement) {
      free_slots.push_back(*plan_.slots[value]);
      last_uses_[value] = program.code.size();  // once only
    }
  };
  for (size_t i = 0; i < inputs_.size(); ++i) take(i);
  for (size_t i = 0; i < program.code.size(); ++i) {
    const MapStatement& statement = program.code[i];
    for (size_t k = 0; k < statement.instruction->arity; ++k) {
      release_after(statement.operands[k], i);
    }
    take(program.value_of(i));
    release_after(program.value_of(i), i);
  }
}

void Planner::emit_inputs() {
  for (size_t i = 0; i < inputs_.size(); ++i) {
    const InputPlan& input = inputs_[i];
    if (input.access == Access::kInPlace) {
      plan_.in_place.push_back(
          {i, op_.input_id(i), StridedWalk(shape_, input.strides)});
      continue;
    }
    const bool per_run = input.access == Access::kLoadPerRun;
    (per_run ? plan_.loads_per_run : plan_.loads)
        .push_back({i, op_.input_id(i),
                    FloatGather(op_.input(i).dtype, shape_, input.strides),
                    input.rate == MapRate::kPerElement});
  }
  plan_.cost = static_cast<int64_t>(inputs_.size() + op_.num_outputs());
}

void Planner::emit_steps() {
  const MapProgram& program = plan_.program;
  for (size_t i = 0; i < program.code.size(); ++i) {
    const MapStatement& statement = program.code[i];
    const size_t out = program.value_of(i);
    const bool per_element = rates_[out] == MapRate::kPerElement;
    size_t uniform = 0;  // bit mask of the uniform operands
    for (size_t k = 0; per_element && k < statement.instruction->arity; ++k) {
      const MapRate rate = rates_[statement.operands[k]];
      if (rate != MapRate::kPerElement) uniform |= size_t{1} << k;
    }
    const bool per_run = rates_[out] == MapRate::kPerRun;
    (per_run ? plan_.steps_per_run : plan_.steps)
        .push_back({statement.instruction->functions[uniform], out,
                    statement.operands, per_element});
    if (per_element) plan_.cost += statement.instruction->cost;
  }
}

void Planner::emit_stores() {
  for (size_t o = 0; o < op_.num_outputs(); ++o) {
    if (written_[o]) continue;
    const size_t value = plan_.program.results[o];
    plan_.stores.push_back({value, op_.output_id(o),
                            store_floats(op_.output(o).dtype),
                            rates_[value] != MapRate::kPerElement});
  }
}

}  // namespace

MapPlan plan_map(const OpView& op) { return Planner(op).finish(); }

}  // namespace popsim::ops
