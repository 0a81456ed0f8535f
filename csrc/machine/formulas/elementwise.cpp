#include "machine/formulas/elementwise.h"

#include <algorithm>
#include <array>

#include "base/numbers.h"

namespace popsim::machine {
namespace {

constexpr int64_t kW = constants::kWorkers;
// Overheads of ops with one operand, with three, and of truth values.
constexpr double kUnary = 17;
constexpr double kExponential = 33;
constexpr double kCast = 37;
constexpr double kTernary = 11;
constexpr double kTruth = 26;

struct Row {
  std::string_view name;
  double float_cycles;
  int64_t float_elements;
  double half_cycles;
  int64_t half_elements;
  double overhead;  // 0: that of binary ops
  Grade grade = Grade::kPublished;
};

// The last rows are composed of others.
constexpr std::array kRows = {
    Row{"abs", 5, 1, 5, 1, kUnary},
    Row{"add", 3, 2, 3, 4, 0},
    Row{"and", 5, 4, 5, 4, kTruth},
    Row{"bfloat16", 2, 4, 2, 4, kCast},
    Row{"ceil", 6, 2, 6, 4, kUnary},
    Row{"clamp", 2, 2, 2, 4, kTernary},
    Row{"copy", 1, 2, 1, 4, kUnary},
    Row{"cos", 2304, 1, 25, 1, kUnary},
    Row{"div", 10, 2, 21, 4, 0},
    Row{"eq", 14, 4, 9, 4, 0},
    Row{"erf", 41, 1, 13, 1, kUnary},
    Row{"exp", 6, 2, 4, 4, kExponential},
    Row{"expm1", 8, 1, 9, 4, kUnary},
    Row{"floor", 6, 2, 6, 4, kUnary},
    Row{"ge", 14, 4, 9, 4, 0},
    Row{"gt", 14, 4, 9, 4, 0},
    Row{"half", 2, 4, 2, 4, kCast},
    Row{"le", 14, 4, 9, 4, 0},
    Row{"log", 12, 2, 4, 4, kUnary},
    Row{"log1p", 22, 2, 22, 4, kUnary},
    Row{"lt", 14, 4, 9, 4, 0},
    Row{"max", 3, 2, 4, 4, 0},
    Row{"min", 3, 2, 4, 4, 0},
    Row{"mul", 3, 2, 3, 4, 0},
    Row{"ne", 14, 4, 9, 4, 0},
    Row{"neg", 2, 2, 2, 4, kUnary},
    Row{"or", 5, 4, 5, 4, kTruth},
    Row{"pow", 312, 1, 325, 1, 0},
    Row{"reciprocal", 6, 2, 15, 4, kUnary},
    Row{"relu", 3, 2, 3, 4, kUnary},
    Row{"round", 6, 2, 6, 4, kUnary},
    Row{"rsqrt", 8, 2, 19, 4, kUnary},
    Row{"sigmoid", 12, 2, 6, 4, kUnary},
    Row{"sign", 9, 2, 9, 4, kUnary},
    Row{"sin", 2304, 1, 25, 1, kUnary},
    Row{"sqrt", 10, 2, 23, 4, kUnary},
    Row{"square", 2, 2, 2, 4, kUnary},
    Row{"sub", 3, 2, 3, 4, 0},
    Row{"tanh", 12, 2, 4, 4, kUnary},
    Row{"where", 5, 1, 5, 1, kTernary},
    Row{"clamp_to_numbers", 2, 2, 2, 4, kTernary, Grade::kAssumed},
    Row{"cube", 5, 2, 5, 4, kUnary, Grade::kAssumed},
    Row{"inverse_square", 8, 2, 17, 4, kUnary, Grade::kAssumed},
    Row{"leaky_relu", 5, 2, 5, 4, kUnary, Grade::kAssumed},
    Row{"log2", 14, 2, 6, 4, kUnary, Grade::kAssumed},
    Row{"not", 14, 4, 9, 4, kUnary, Grade::kAssumed},
    Row{"trunc", 6, 2, 6, 4, kUnary, Grade::kAssumed},
};

bool is_unary(const Row& row) {
  return row.overhead == kUnary || row.overhead == kExponential ||
         row.overhead == kCast;
}

double binary_overhead(bool half) { return half ? 26 : 29; }

OpCost with_sync(double compute) {
  OpCost cost;
  cost.compute = compute;
  cost.sync = constants::kSync.value;
  return cost;
}

}  // namespace

std::optional<VectorLoop> instruction_loop(std::string_view name, bool half,
                                           bool scalar) {
  const auto* row = std::ranges::find(kRows, name, &Row::name);
  if (row == kRows.end()) return std::nullopt;
  if (scalar && (name == "add" || name == "sub" || name == "mul")) {
    return VectorLoop{2, half ? 4 : 2, 20, false, row->grade};
  }
  const double overhead =
      row->overhead > 0 ? row->overhead : binary_overhead(half);
  return VectorLoop{half ? row->half_cycles : row->float_cycles,
                    half ? row->half_elements : row->float_elements, overhead,
                    is_unary(*row), row->grade};
}

VectorLoop pass(double cycles, bool half) {
  return {cycles, half ? 4 : 2, binary_overhead(half), false,
          Grade::kPublished};
}

OpCost elementwise(int64_t elements, const VectorLoop& loop) {
  const int64_t vectors = ceil_div(ceil_div(elements, kW), loop.elements);
  OpCost cost =
      with_sync(constants::kVertex.value + (loop.unary ? 9 : 0) +
                double{kW} * (loop.overhead +
                              static_cast<double>(vectors) * loop.cycles));
  cost.grade = loop.grade;
  cost.formula = "elementwise";
  return cost;
}

OpCost cast(int64_t elements, bool of_integers) {
  const auto own = static_cast<double>(ceil_div(elements, kW));
  OpCost cost =
      with_sync(12 + double{kW} * (37 + own * (of_integers ? 2 : 0.5)));
  cost.formula = "cast";
  return cost;
}

OpCost fill(int64_t elements, bool half) {
  const auto own = static_cast<double>(ceil_div(elements, kW));
  OpCost cost = with_sync(double{kW} * (half ? 26 + own / 4 : 23 + own / 2));
  cost.formula = "fill";
  return cost;
}

// PopLibs, poprand/poprandCycleEstimators.
OpCost random_numbers(int64_t elements, double cycles, bool half) {
  const int64_t vectors =
      ceil_div(ceil_div(elements, kW), half ? int64_t{4} : int64_t{2});
  OpCost cost =
      with_sync(double{kW} * (24 + static_cast<double>(vectors) * cycles));
  cost.formula = "random numbers";
  return cost;
}

}  // namespace popsim::machine
