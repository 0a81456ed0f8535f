// Arithmetic on single numbers, in float64, as Python does it: the step
// counts, rates and corrections of a weight update.
#include <array>
#include <cmath>
#include <limits>
#include <sstream>

#include "ops/op_def.h"
#include "ops/operands/number.h"
#include "ops/work.h"

namespace popsim::ops {
namespace {

constexpr size_t kMaxNumberOperands = 3;
using NumberFunction = double (*)(double a, double b, double c);

struct NumberInstruction {
  std::string_view name;
  size_t arity;
  NumberFunction function;
};

// As torch.maximum and torch.minimum: NaN if an operand is NaN.
double larger(double a, double b) {
  return std::isnan(a) ? a : (std::isnan(b) || b > a ? b : a);
}

double smaller(double a, double b) {
  return std::isnan(a) ? a : (std::isnan(b) || b < a ? b : a);
}

double sign_of(double a) {
  return static_cast<double>(a > 0) - static_cast<double>(a < 0);
}

// Truth values are 1 and 0. `float32` rounds, as a store to a float32 tensor
// does.
constexpr std::array kNumberInstructions{
    NumberInstruction{"abs", 1,
                      [](double a, double, double) { return std::fabs(a); }},
    NumberInstruction{"add", 2,
                      [](double a, double b, double) { return a + b; }},
    NumberInstruction{"and", 2,
                      [](double a, double b, double) {
                        return a != 0 && b != 0 ? 1.0 : 0.0;
                      }},
    NumberInstruction{"ceil", 1,
                      [](double a, double, double) { return std::ceil(a); }},
    NumberInstruction{"clamp", 3,
                      [](double a, double low, double high) {
                        return smaller(larger(a, low), high);
                      }},
    NumberInstruction{"cos", 1,
                      [](double a, double, double) { return std::cos(a); }},
    NumberInstruction{"div", 2,
                      [](double a, double b, double) { return a / b; }},
    NumberInstruction{
        "eq", 2, [](double a, double b, double) { return a == b ? 1.0 : 0.0; }},
    NumberInstruction{"erf", 1,
                      [](double a, double, double) { return std::erf(a); }},
    NumberInstruction{"exp", 1,
                      [](double a, double, double) { return std::exp(a); }},
    NumberInstruction{"expm1", 1,
                      [](double a, double, double) { return std::expm1(a); }},
    NumberInstruction{"float32", 1,
                      [](double a, double, double) -> double {
                        return static_cast<float>(a);
                      }},
    NumberInstruction{"floor", 1,
                      [](double a, double, double) { return std::floor(a); }},
    NumberInstruction{
        "ge", 2, [](double a, double b, double) { return a >= b ? 1.0 : 0.0; }},
    NumberInstruction{
        "gt", 2, [](double a, double b, double) { return a > b ? 1.0 : 0.0; }},
    NumberInstruction{
        "le", 2, [](double a, double b, double) { return a <= b ? 1.0 : 0.0; }},
    NumberInstruction{"log", 1,
                      [](double a, double, double) { return std::log(a); }},
    NumberInstruction{"log1p", 1,
                      [](double a, double, double) { return std::log1p(a); }},
    NumberInstruction{"log2", 1,
                      [](double a, double, double) { return std::log2(a); }},
    NumberInstruction{
        "lt", 2, [](double a, double b, double) { return a < b ? 1.0 : 0.0; }},
    NumberInstruction{"max", 2,
                      [](double a, double b, double) { return larger(a, b); }},
    NumberInstruction{"min", 2,
                      [](double a, double b, double) { return smaller(a, b); }},
    NumberInstruction{"mul", 2,
                      [](double a, double b, double) { return a * b; }},
    NumberInstruction{
        "ne", 2, [](double a, double b, double) { return a != b ? 1.0 : 0.0; }},
    NumberInstruction{"neg", 1, [](double a, double, double) { return -a; }},
    NumberInstruction{
        "not", 1, [](double a, double, double) { return a == 0 ? 1.0 : 0.0; }},
    NumberInstruction{"or", 2,
                      [](double a, double b, double) {
                        return a != 0 || b != 0 ? 1.0 : 0.0;
                      }},
    NumberInstruction{
        "pow", 2, [](double a, double b, double) { return std::pow(a, b); }},
    NumberInstruction{"reciprocal", 1,
                      [](double a, double, double) { return 1 / a; }},
    NumberInstruction{"relu", 1,
                      [](double a, double, double) { return larger(a, 0); }},
    NumberInstruction{
        "round", 1, [](double a, double, double) { return std::nearbyint(a); }},
    NumberInstruction{
        "rsqrt", 1, [](double a, double, double) { return 1 / std::sqrt(a); }},
    NumberInstruction{
        "sigmoid", 1,
        [](double a, double, double) { return 1 / (1 + std::exp(-a)); }},
    NumberInstruction{"sign", 1,
                      [](double a, double, double) { return sign_of(a); }},
    NumberInstruction{"sin", 1,
                      [](double a, double, double) { return std::sin(a); }},
    NumberInstruction{"sqrt", 1,
                      [](double a, double, double) { return std::sqrt(a); }},
    NumberInstruction{"square", 1,
                      [](double a, double, double) { return a * a; }},
    NumberInstruction{"sub", 2,
                      [](double a, double b, double) { return a - b; }},
    NumberInstruction{"tanh", 1,
                      [](double a, double, double) { return std::tanh(a); }},
    NumberInstruction{"trunc", 1,
                      [](double a, double, double) { return std::trunc(a); }},
    NumberInstruction{"where", 3,
                      [](double condition, double a, double b) {
                        return condition != 0 ? a : b;
                      }},
};

const NumberInstruction* find_number_instruction(std::string_view name) {
  for (const NumberInstruction& instruction : kNumberInstructions) {
    if (instruction.name == name) return &instruction;
  }
  return nullptr;
}

struct NumberStatement {
  NumberFunction function;
  std::array<size_t, kMaxNumberOperands> operands;
};

NumberStatement parse_number_statement(const OpCall& op,
                                       const std::string& text,
                                       size_t num_values) {
  std::istringstream words(text);
  std::string name;
  words >> name;
  const NumberInstruction* instruction = find_number_instruction(name);
  op.require(instruction != nullptr, "the instruction of '", text,
             "' is known");
  NumberStatement statement{instruction->function, {}};
  size_t count = 0;
  std::string word;
  while (words >> word) {
    op.require(word.find_first_not_of("0123456789") == std::string::npos &&
                   word.size() < 10 && count < instruction->arity &&
                   std::stoul(word) < num_values,
               "'", text, "' reads ", instruction->arity,
               " values before it, of ", num_values);
    statement.operands[count++] = std::stoul(word);
  }
  op.require(count == instruction->arity, "'", text, "' has ",
             instruction->arity, " operands");
  return statement;
}

size_t num_number_values(const OpCall& op) {
  return op.num_inputs() +
         op.attribute<std::vector<double>>("constants").size() +
         op.attribute<std::vector<std::string>>("code").size();
}

std::vector<TensorType> numbers_types(const OpCall& op) {
  for (size_t i = 0; i < op.num_inputs(); ++i) {
    op.require(
        op.input(i).numel() == 1 && op.input(i).dtype != DType::kComplex64,
        "input ", i, " is one number");
  }
  const auto& code = op.attribute<std::vector<std::string>>("code");
  size_t num_values = num_number_values(op) - code.size();
  for (const std::string& text : code) {
    static_cast<void>(parse_number_statement(op, text, num_values++));
  }
  const auto& results = op.attribute<std::vector<int64_t>>("results");
  const auto& dtypes = op.attribute<std::vector<std::string>>("dtypes");
  op.require(results.size() == dtypes.size(), "each result has a dtype");
  std::vector<TensorType> types;
  for (size_t i = 0; i < results.size(); ++i) {
    op.require(results[i] < static_cast<int64_t>(num_values), "result ", i,
               " is one of the ", num_values, " values");
    types.push_back({dtype_from_name(dtypes[i]), {}});
  }
  return types;
}

class NumbersKernel final : public Kernel {
 public:
  explicit NumbersKernel(const OpView& op)
      : values_(num_number_values(op)),
        first_(op.num_inputs() +
               op.attribute<std::vector<double>>("constants").size()) {
    for (size_t i = 0; i < op.num_inputs(); ++i) {
      inputs_.push_back({op.input_id(i), read_number(op.input(i).dtype)});
    }
    const auto& constants = op.attribute<std::vector<double>>("constants");
    std::copy(constants.begin(), constants.end(),
              values_.begin() + static_cast<int64_t>(inputs_.size()));
    size_t known = first_;
    for (const std::string& text :
         op.attribute<std::vector<std::string>>("code")) {
      code_.push_back(parse_number_statement(op, text, known++));
    }
    const auto& results = op.attribute<std::vector<int64_t>>("results");
    for (size_t i = 0; i < results.size(); ++i) {
      if (!op.has_output(i)) continue;
      outputs_.push_back({op.output_id(i), static_cast<size_t>(results[i]),
                          write_number(op.output(i).dtype)});
    }
  }

  void run(const RunContext& context) override {
    for (size_t i = 0; i < inputs_.size(); ++i) {
      values_[i] = inputs_[i].read(context.data(inputs_[i].tensor));
    }
    for (size_t i = 0; i < code_.size(); ++i) {
      const auto& [a, b, c] = code_[i].operands;
      values_[first_ + i] =
          code_[i].function(values_[a], values_[b], values_[c]);
    }
    for (const Output& output : outputs_) {
      output.write(values_[output.value], context.data(output.tensor));
    }
  }

 private:
  struct Input {
    graph::TensorId tensor;
    ReadNumber read;
  };
  struct Output {
    graph::TensorId tensor;
    size_t value;
    WriteNumber write;
  };

  std::vector<Input> inputs_;
  std::vector<NumberStatement> code_;
  std::vector<Output> outputs_;
  std::vector<double> values_;
  size_t first_;  // the value of the first statement
};

}  // namespace

extern const OpDef kNumbers{
    .name = "numbers",
    .schema =
        "numbers(Tensor[] inputs, *, str[] code, float[] constants, "
        "int{0..}[] results, dtype{float32, float64, float16, bool, int64, "
        "int32}[] dtypes) -> Tensor[]",
    .family = "map",
    .shape = numbers_types,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<NumbersKernel>(op);
    },
    .work = [](const OpView& op) -> std::vector<graph::Work> {
      const auto instructions = static_cast<int64_t>(
          op.attribute<std::vector<std::string>>("code").size());
      return {graph::Elementwise{1, instructions}};
    },
    .reuses_input = true,
    .cheap = true,
};

}  // namespace popsim::ops
