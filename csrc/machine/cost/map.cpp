// Elementwise ops.
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "machine/cost/common.h"
#include "machine/formulas/rearrange.h"

namespace popsim::machine {
namespace {

using graph::kNoTensor;
using graph::TensorId;
using ops::OpView;

constexpr double kRowOverhead = 12;  // of an operand that is broadcast
constexpr double kFusedCycles = 2;   // a load and a store that a chain saves

// An instruction of the code: its name, and whether an operand is a number.
struct Line {
  std::string name;
  bool scalar = false;
};

std::vector<Line> lines_of(const OpView& op) {
  const auto& code = op.attribute<std::vector<std::string>>("code");
  const auto& constants = op.attribute<std::vector<double>>("constants");
  const size_t num_inputs = op.num_inputs();
  std::vector<Line> lines;
  for (const std::string& text : code) {
    std::istringstream words(text);
    Line line;
    words >> line.name;
    for (size_t value = 0; words >> value;) {
      const bool is_constant =
          value >= num_inputs && value < num_inputs + constants.size();
      const bool is_number = value < num_inputs && op.has_input(value) &&
                             op.input(value).numel() == 1;
      line.scalar = line.scalar || is_constant || is_number;
    }
    lines.push_back(line);
  }
  return lines;
}

VectorLoop loop_of(const Line& line, bool half) {
  if (auto loop = instruction_loop(line.name, half, line.scalar)) return *loop;
  // Without a figure of its own: as long as an exponential.
  VectorLoop loop = *instruction_loop("exp", half, false);
  loop.grade = Grade::kAssumed;
  return loop;
}

// A chain pays each load and store, and the overhead, once.
VectorLoop chain_of(const std::vector<Line>& lines, bool half) {
  if (lines.empty()) return *instruction_loop("copy", half, false);
  VectorLoop chain = loop_of(lines[0], half);
  if (lines.size() == 1) return chain;
  const int64_t vector = half ? 4 : 2;
  double cycles = 0;
  double longest = 0;
  for (const Line& line : lines) {
    const VectorLoop loop = loop_of(line, half);
    const double own = loop.rate() * static_cast<double>(vector);
    longest = std::max(longest, own);
    cycles += own;
    chain.grade = worse(chain.grade, loop.grade);
    chain.overhead = std::max(chain.overhead, loop.overhead);
  }
  cycles -= kFusedCycles * static_cast<double>(lines.size() - 1);
  chain.cycles = std::max(cycles, longest);
  chain.elements = vector;
  chain.unary = false;
  chain.grade = worse(chain.grade, Grade::kAssumed);
  return chain;
}

// The operand whose layout the result takes: with most tiles, ties first.
TensorId leader_of(const OpView& op, CostContext& context, int64_t numel) {
  TensorId leader = kNoTensor;
  for (const TensorId id : op.op().inputs) {
    if (id == kNoTensor || op.graph().tensor(id).numel() != numel) continue;
    if (repeats_elements(op, id)) continue;
    if (leader == kNoTensor ||
        context.layouts.of(id).tiles > context.layouts.of(leader).tiles) {
      leader = id;
    }
  }
  return leader;
}

// Numbers of 16 bits go through in twos; truth values as what they came from.
bool is_half_map(const OpView& op, const graph::Tensor& result) {
  if (is_floating(result.dtype)) return is_half(result.dtype);
  bool half = false;
  for (const TensorId id : op.op().inputs) {
    if (id == kNoTensor || !is_floating(op.graph().tensor(id).dtype)) continue;
    if (!is_half(op.graph().tensor(id).dtype)) return false;
    half = true;
  }
  return half;
}

OpCost map_cost(const OpView& op, CostContext& context) {
  const TensorId output = [&] {
    for (const TensorId id : op.op().outputs) {
      if (id != kNoTensor) return id;
    }
    return op.input_id(0);
  }();
  const graph::Tensor& result = op.graph().tensor(output);
  const TensorId leader = leader_of(op, context, result.numel());
  if (leader != kNoTensor) follow(context, op, leader);
  const Layout layout = context.layouts.of(output);
  const int64_t elements = context.layouts.elements_per_tile(output);
  const bool half = is_half_map(op, result);
  VectorLoop loop = chain_of(lines_of(op), half);
  OpCost moves;
  for (const TensorId id : op.op().inputs) {
    if (id == kNoTensor || id == leader) continue;
    const graph::Tensor& operand = op.graph().tensor(id);
    const int64_t memory = op.graph().tensor(op.graph().root(id)).numel();
    const int64_t distinct = std::min(operand.numel(), memory);
    if (distinct == 1) continue;
    if (distinct == result.numel()) {
      moves += bring(context, op, id, layout);
      continue;
    }
    // Each tile gets the distinct elements that it needs.
    loop.overhead += kRowOverhead;
    loop.grade = worse(loop.grade, Grade::kAssumed);
    const int64_t needed = std::min(elements, distinct);
    moves += move(static_cast<double>(needed * device_size(operand.dtype)));
  }
  // All operands move in one exchange.
  moves.sync = std::min(moves.sync, constants::kSync.value);
  OpCost cost = elementwise(elements, loop);
  cost += moves;
  return glued(named(cost, "elementwise"));
}

OpCost stochastic_round_cost(const OpView& op, CostContext& context) {
  follow(context, op, op.input_id(0));
  OpCost cost = tensor_pass(context, op, op.input_id(0), 2);
  cost += cast(context.layouts.elements_per_tile(op.input_id(0)), false);
  return glued(assumed(cost));
}

// One worker of one tile does arithmetic on single numbers, an instruction
// after the other.
OpCost numbers_cost(const OpView& op, CostContext& context) {
  static_cast<void>(context);
  VectorLoop chain = chain_of(lines_of(op), false);
  chain.grade = Grade::kAssumed;
  return glued(named(elementwise(1, chain), "numbers"));
}

constexpr CostEntry kElementwiseCosts[] = {
    {"map", map_cost},
    {"numbers", numbers_cost},
    {"stochastic_round", stochastic_round_cost},
};

}  // namespace

std::span<const CostEntry> elementwise_costs() { return kElementwiseCosts; }

}  // namespace popsim::machine
