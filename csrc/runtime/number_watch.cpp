#include "runtime/number_watch.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/isinf.h>
#include <ATen/ops/isnan.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <sstream>
#include <string_view>
#include <variant>

#include "base/check.h"
#include "ops/op_def.h"
#include "ops/operands/aten_types.h"

namespace popsim::runtime {
namespace {

using graph::Op;
using graph::TensorId;

constexpr const char* kInvalid = "invalid operation";
constexpr const char* kDivision = "division by zero";
constexpr const char* kOverflow = "overflow";
constexpr const char* kOverflowOrDivision = "overflow or division by zero";

constexpr std::array<std::string_view, 6> kComparisons{"eq", "ne", "lt",
                                                       "le", "gt", "ge"};

// An instruction that gives infinity for one number: the operand, and the
// number.
struct Pole {
  std::string_view instruction;
  size_t operand;
  double at;
};
constexpr std::array<Pole, 7> kPoles{{{"div", 1, 0.0},
                                      {"log", 0, 0.0},
                                      {"log1p", 0, -1.0},
                                      {"log2", 0, 0.0},
                                      {"pow", 0, 0.0},
                                      {"reciprocal", 0, 0.0},
                                      {"rsqrt", 0, 0.0}}};

template <typename Names>
bool contains(const Names& names, std::string_view name) {
  return std::ranges::find(names, name) != names.end();
}

// Calls `visit` with each number among the attributes of an op.
template <typename Visit>
void for_each_number(const Op& op, const Visit& visit) {
  const auto all = [&](const std::vector<double>& numbers) {
    std::ranges::for_each(numbers, visit);
  };
  for (const auto& [name, attribute] : op.attributes) {
    if (const auto* number = std::get_if<double>(&attribute)) visit(*number);
    if (const auto* list = std::get_if<std::vector<double>>(&attribute)) {
      all(*list);
    }
    const auto* arguments = std::get_if<graph::Arguments>(&attribute);
    if (arguments == nullptr) continue;
    for (const graph::Argument& argument : arguments->values) {
      if (const auto* number = std::get_if<double>(&argument)) visit(*number);
      if (const auto* pair = std::get_if<std::complex<double>>(&argument)) {
        visit(pair->real());
        visit(pair->imag());
      }
      if (const auto* list = std::get_if<std::vector<double>>(&argument)) {
        all(*list);
      }
    }
  }
}

// An instruction of a map and the numbers of the values that it reads.
struct Statement {
  std::string instruction;
  std::vector<size_t> operands;
};

std::vector<Statement> statements(const ops::OpCall& map) {
  std::vector<Statement> code;
  for (const std::string& line :
       map.attribute<std::vector<std::string>>("code")) {
    std::istringstream words(line);
    Statement& statement = code.emplace_back();
    words >> statement.instruction;
    for (size_t number = 0; words >> number;) {
      statement.operands.push_back(number);
    }
  }
  return code;
}

// Whether an op is one comparison of two different values. x != x is a test for
// NaN.
bool compares(const ops::OpCall& call) {
  const Op& op = call.op();
  if (op.kind == "map") {
    const std::vector<Statement> code = statements(call);
    return code.size() == 1 &&
           contains(kComparisons, code.front().instruction) &&
           code.front().operands[0] != code.front().operands[1];
  }
  if (op.kind != "aten") return false;
  const std::string_view name = call.attribute<std::string>("operator");
  const size_t begin = name.starts_with("aten::") ? 6 : 0;
  return contains(kComparisons, name.substr(begin, name.find('.') - begin)) &&
         (op.inputs.size() < 2 || op.inputs[0] != op.inputs[1]);
}

bool any(const at::Tensor& mask) { return mask.any().item<bool>(); }

// The position of the first true value, as "[0, 3]".
std::string first_place(const at::Tensor& mask) {
  const at::Tensor place = mask.nonzero()[0];
  Shape index;
  for (int64_t i = 0; i < place.numel(); ++i) {
    index.push_back(place[i].item<int64_t>());
  }
  return to_string(index);
}

}  // namespace

NumberWatch::NumberWatch(const graph::Graph& graph) : graph_(graph) {
  for (const Op& op : graph.ops()) {
    rules_.push_back(rule_of(op));
    for (const auto& body : op.bodies) {
      bodies_[body.get()] = std::make_unique<NumberWatch>(*body);
    }
  }
}

NumberWatch::Rule NumberWatch::rule_of(const Op& op) const {
  if (!op.bodies.empty())
    return Rule::kNone;  // the ops of its bodies are watched
  // Values from the host are given, as inputs are.
  if (ops::find_op(op.kind).calls_host) return Rule::kNone;
  if (compares({graph_, op})) return Rule::kComparison;
  const bool computes = std::ranges::any_of(op.outputs, [&](TensorId id) {
    return id != graph::kNoTensor && is_inexact(graph_.tensor(id).dtype);
  });
  if (!computes) return Rule::kNone;
  return ops::find_op(op.kind).elementwise ? Rule::kElementwise : Rule::kWhole;
}

at::Tensor NumberWatch::value(TensorId id,
                              const ops::RunContext& context) const {
  const graph::Tensor& tensor = graph_.tensor(id);
  return at::from_blob(context.data(id), tensor.shape, tensor.strides,
                       ops::to_scalar_type(tensor.dtype));
}

bool NumberWatch::is_overwritten(const Op& op, TensorId input,
                                 const ops::RunContext& context) const {
  return context.cursor.accumulation_step == 0 &&
         ops::find_op(op.kind).begins_anew &&
         std::ranges::any_of(op.outputs, [&](TensorId output) {
           return output != graph::kNoTensor &&
                  graph_.root(output) == graph_.root(input);
         });
}

void NumberWatch::before(const Op& op, const ops::RunContext& context) {
  known_ = {};
  operands_.clear();
  const Rule rule = this->rule(op);
  if (rule == Rule::kNone) return;
  for_each_number(op, [this](double number) {
    known_.nan = known_.nan || std::isnan(number);
    known_.infinity = known_.infinity || std::isinf(number);
  });
  for (const TensorId id : op.inputs) {
    if (rule == Rule::kElementwise) {
      operands_.push_back(value(id, context).clone());
      continue;
    }
    if (id == graph::kNoTensor || !is_inexact(graph_.tensor(id).dtype) ||
        is_overwritten(op, id, context)) {
      continue;
    }
    const at::Tensor operand = value(id, context);
    if (at::isfinite(operand).all().item<bool>()) continue;
    known_.nan = known_.nan || any(at::isnan(operand));
    known_.infinity = known_.infinity || any(at::isinf(operand));
  }
}

void NumberWatch::after(const Op& op, const ops::RunContext& context) {
  const Rule rule = this->rule(op);
  if (rule == Rule::kNone) return;
  if (rule == Rule::kComparison) {
    check_user(!known_.nan, "while running ", describe(op),
               ": floating-point exception, ", kInvalid,
               ": an operand of the comparison is NaN");
    return;
  }
  for (const TensorId id : op.outputs) {
    if (id == graph::kNoTensor || !is_inexact(graph_.tensor(id).dtype)) {
      continue;
    }
    const at::Tensor values = value(id, context);
    if (!at::isfinite(values).all().item<bool>()) check(op, id, values);
  }
  operands_.clear();
}

void NumberWatch::check(const Op& op, TensorId result,
                        const at::Tensor& values) const {
  const auto fail = [&](const std::string& kind, const char* what,
                        const at::Tensor& bad, const char* instead) {
    const graph::Tensor& tensor = graph_.tensor(result);
    const std::string& name = tensor.name.empty() ? op.name : tensor.name;
    throw UserError(join("while running ", describe(op),
                         ": floating-point exception, ", kind, ": its result '",
                         name, "' (", name_of(tensor.dtype), ' ',
                         to_string(tensor.shape), ") has ", what, " at ",
                         first_place(bad), ", and no operand ", instead));
  };
  if (!known_.nan) {
    const at::Tensor bad = without_inherited(at::isnan(values), &at::isnan);
    if (any(bad)) fail(kInvalid, "NaN", bad, "is NaN");
  }
  if (!known_.infinity) {
    const at::Tensor bad = without_inherited(at::isinf(values), &at::isinf);
    if (any(bad)) {
      fail(cause_of_infinity(op, bad), "an infinity", bad, "is infinite");
    }
  }
}

at::Tensor NumberWatch::without_inherited(
    const at::Tensor& bad, at::Tensor (*is_bad)(const at::Tensor&)) const {
  at::Tensor left = bad;
  for (const at::Tensor& operand : operands_) {
    left = left.logical_and(is_bad(operand).logical_not());
  }
  return left;
}

std::string NumberWatch::cause_of_infinity(const Op& op,
                                           const at::Tensor& bad) const {
  if (op.kind != "map") {
    return ops::find_op(op.kind).only_overflows ? kOverflow
                                                : kOverflowOrDivision;
  }
  const ops::OpCall map(graph_, op);
  const auto& constants = map.attribute<std::vector<double>>("constants");
  for (const Statement& statement : statements(map)) {
    const auto* const pole =
        std::ranges::find(kPoles, statement.instruction, &Pole::instruction);
    if (pole == kPoles.end()) continue;
    const size_t divisor = statement.operands[pole->operand];
    if (divisor < operands_.size()) {
      if (any(bad.logical_and(operands_[divisor].eq(pole->at)))) {
        return kDivision;
      }
    } else if (divisor < operands_.size() + constants.size() &&
               constants[divisor - operands_.size()] == pole->at) {
      return kDivision;
    }
  }
  return kOverflow;
}

}  // namespace popsim::runtime
