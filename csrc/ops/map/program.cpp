#include "ops/map/program.h"

#include <cmath>
#include <sstream>
#include <utility>

#include "base/check.h"

namespace popsim::ops {
namespace {

MapStatement parse_statement(const std::string& text, size_t num_values,
                             const std::string& where) {
  std::istringstream words(text);
  std::string name;
  words >> name;
  MapStatement statement{find_map_instruction(name), {}};
  check_internal(statement.instruction != nullptr, where,
                 "unknown instruction");
  std::vector<size_t> operands;
  std::string word;
  while (words >> word) {
    const bool number =
        word.find_first_not_of("0123456789") == std::string::npos &&
        word.size() < 10;
    check_internal(number, where, "operand '", word, "' is not a value number");
    const size_t value = std::stoul(word);
    check_internal(value < num_values, where, "operand ", value,
                   " is not defined yet, there are ", num_values, " values");
    operands.push_back(value);
  }
  const size_t arity = statement.instruction->arity;
  check_internal(operands.size() == arity, where, "expected ", arity,
                 " operands, got ", operands.size());
  std::copy(operands.begin(), operands.end(), statement.operands.begin());
  return statement;
}

const MapInstruction* known(std::string_view name) {
  const MapInstruction* found = find_map_instruction(name);
  check_internal(found != nullptr, "map: no instruction '", name, "'");
  return found;
}

// torch.pow computes these exponents, if they are numbers, without pow.
void specialise_power(MapStatement& power, double exponent) {
  static constexpr std::array<std::pair<double, std::string_view>, 7> kPowers{{
      {-2.0, "inverse_square"},
      {-1.0, "reciprocal"},
      {-0.5, "rsqrt"},
      {0.5, "sqrt"},
      {1.0, "copy"},
      {2.0, "square"},
      {3.0, "cube"},
  }};
  for (const auto& [value, name] : kPowers) {
    if (exponent != value) continue;
    power = {known(name), {power.operands[0], 0, 0}};
    return;
  }
}

void specialise(MapStatement& statement, const MapProgram& program) {
  const auto constant = [&](size_t operand) -> double {
    const size_t value = statement.operands[operand];
    return program.is_constant(value)
               ? program.constants[value - program.num_inputs]
               : std::nan("");
  };
  const std::string_view name = statement.instruction->name;
  if (name == "pow") {
    specialise_power(statement, constant(1));
  } else if (name == "clamp" && !std::isnan(constant(1)) &&
             !std::isnan(constant(2))) {
    statement.instruction = known("clamp_to_numbers");
  }
}

}  // namespace

int64_t MapProgram::cost() const {
  int64_t sum = 0;
  for (const MapStatement& statement : code) sum += statement.instruction->cost;
  return sum;
}

MapProgram parse_map_program(const std::string& op_name, size_t num_inputs,
                             std::span<const std::string> code,
                             std::span<const double> constants,
                             std::span<const int64_t> results) {
  MapProgram program;
  program.num_inputs = num_inputs;
  program.constants.assign(constants.begin(), constants.end());
  for (size_t i = 0; i < code.size(); ++i) {
    const std::string where =
        join("map '", op_name, "': instruction ", i, " '", code[i], "': ");
    MapStatement statement =
        parse_statement(code[i], program.num_values(), where);
    specialise(statement, program);
    program.code.push_back(statement);
  }
  for (const int64_t value : results) {
    const bool defined =
        value >= 0 && static_cast<size_t>(value) < program.num_values();
    check_internal(defined, "map '", op_name, "': result ", value,
                   " is not one of the ", program.num_values(), " values");
    program.results.push_back(static_cast<size_t>(value));
  }
  return program;
}

}  // namespace popsim::ops
