#include "ops/schema.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>

#include "base/check.h"

namespace popsim::ops {
namespace {

constexpr std::array<std::string_view, 6> kTypeNames{
    "bool", "int", "float", "str", "dtype", "arguments"};
constexpr DType kLastDType = DType::kComplex64;
constexpr std::array<std::string_view, 4> kCountNames{"one", "optional", "any",
                                                      "counted"};

std::vector<DType> dtypes_from_word(const std::string& word) {
  if (word == "floats") {
    return {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
  }
  if (word == "indices") return {DType::kInt32, DType::kInt64};
  try {
    return {dtype_from_name(word)};
  } catch (const UserError& error) {
    throw InternalError(join("schema: ", error.what()));
  }
}

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  [[nodiscard]] Schema parse() {
    Schema schema;
    schema.name = word();
    if (take("[")) {
      schema.repeats = word();
      expect("]");
    }
    expect("(");
    bool of_attributes = false;
    for (bool first = true; !take(")"); first = false) {
      if (!first) expect(",");
      if (take("*")) {
        if (of_attributes) fail("a second *");
        of_attributes = true;
      } else if (of_attributes) {
        schema.attributes.push_back(attribute());
      } else {
        schema.inputs.push_back(operand(/*needs_name=*/true));
      }
    }
    expect("->");
    parse_outputs(schema);
    if (!rest().empty()) fail("more text");
    check(schema);
    return schema;
  }

 private:
  void parse_outputs(Schema& schema) {
    if (!take("(")) {
      schema.outputs.push_back(operand(/*needs_name=*/false));
      return;
    }
    for (bool first = true; !take(")"); first = false) {
      if (!first) expect(",");
      schema.outputs.push_back(operand(/*needs_name=*/false));
    }
  }

  Operand operand(bool needs_name) {
    Operand result;
    if (word() != "Tensor") fail("not a Tensor");
    if (take("(")) {
      result.memory = word();
      result.written = take("!");
      expect(")");
    }
    for (const std::string& name : words_in_braces()) {
      std::ranges::copy(dtypes_from_word(name),
                        std::back_inserter(result.dtypes));
    }
    const bool optional = take("?");
    if (take("[")) {
      result.has_gaps = optional;
      result.count = Count::kAny;
      if (!take("]")) {
        if (optional) fail("counted tensors are not optional");
        result.count = Count::kCounted;
        result.counter = word();
        expect("]");
      }
    } else if (optional) {
      result.count = Count::kOptional;
    }
    if (needs_name || at_word()) result.name = word();
    return result;
  }

  AttributeRule attribute() {
    AttributeRule rule;
    const std::string type = word();
    const auto* found = std::ranges::find(kTypeNames, type);
    if (found == kTypeNames.end()) fail("not a type of attributes");
    rule.type = static_cast<AttributeType>(found - kTypeNames.begin());
    if (rule.type == AttributeType::kInt ||
        rule.type == AttributeType::kFloat) {
      parse_range(rule);
    } else {
      rule.choices = words_in_braces();
      if (rule.type == AttributeType::kDType) spell_out(rule.choices);
    }
    if (take("[")) {
      rule.is_list = true;
      if (!take("]")) {
        rule.length = static_cast<int64_t>(number());
        expect("]");
      }
    }
    rule.optional = take("?");
    rule.name = word();
    if (take("=")) rule.default_value = default_value(rule);
    return rule;
  }

  void parse_range(AttributeRule& rule) {
    if (!take("{")) return;
    if (!rest().starts_with("..")) rule.least = number();
    expect("..");
    if (take("}")) return;
    rule.most = number();
    expect("}");
  }

  graph::Attribute default_value(const AttributeRule& rule) {
    if (rule.is_list || rule.optional) fail("no default here");
    switch (rule.type) {
      case AttributeType::kBool: {
        const std::string value = word();
        if (value != "True" && value != "False") fail("not True or False");
        return value == "True";
      }
      case AttributeType::kInt:
        return static_cast<int64_t>(number());
      case AttributeType::kFloat:
        return number();
      case AttributeType::kString:
      case AttributeType::kDType:
        return word();
      case AttributeType::kArguments:
        break;
    }
    fail("no default here");
  }

  // An empty list stands for every dtype.
  static void spell_out(std::vector<std::string>& dtypes) {
    std::vector<std::string> names;
    for (int8_t i = 0; dtypes.empty() && i <= static_cast<int8_t>(kLastDType);
         ++i) {
      names.emplace_back(name_of(static_cast<DType>(i)));
    }
    for (const std::string& word : dtypes) {
      for (const DType dtype : dtypes_from_word(word)) {
        names.emplace_back(name_of(dtype));
      }
    }
    dtypes = std::move(names);
  }

  // Checks that every counter exists, and that at most one list has any length.
  void check(const Schema& schema) const {
    const auto counts = [&](const std::string& name) {
      return schema.attribute(name) != nullptr || schema.input(name) != nullptr;
    };
    if (!schema.repeats.empty() && !schema.attribute(schema.repeats)) {
      fail("no attribute with the number of repeats");
    }
    for (const auto* operands : {&schema.inputs, &schema.outputs}) {
      int open = 0;
      for (const Operand& operand : *operands) {
        if (operand.count == Count::kAny) ++open;
        if (operand.count == Count::kCounted && !counts(operand.counter)) {
          fail("no attribute or input counts '" + operand.name + "'");
        }
      }
      if (open > 1) fail("two lists of any length");
    }
    for (const Operand& output : schema.outputs) {
      if (output.memory.empty()) continue;
      if (std::ranges::count(schema.inputs, output.memory, &Operand::memory) !=
          1) {
        fail("not one input with the letter '" + output.memory + "'");
      }
    }
  }

  // --- Words ---

  [[nodiscard]] std::string_view rest() {
    while (!text_.substr(position_).empty() && text_[position_] == ' ') {
      ++position_;
    }
    return text_.substr(position_);
  }
  [[nodiscard]] static bool in_word(char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_';
  }
  [[nodiscard]] bool at_word() {
    return !rest().empty() && in_word(rest().front());
  }
  bool take(std::string_view symbol) {
    if (!rest().starts_with(symbol)) return false;
    position_ += symbol.size();
    return true;
  }
  void expect(std::string_view symbol) {
    if (!take(symbol)) fail("expected '" + std::string(symbol) + "'");
  }
  std::string word() {
    if (!at_word()) fail("expected a word");
    const std::string_view from = rest();
    const auto* end = std::ranges::find_if_not(from, in_word);
    const std::string result(from.begin(), end);
    position_ += result.size();
    return result;
  }
  std::vector<std::string> words_in_braces() {
    std::vector<std::string> words;
    if (!take("{")) return words;
    do {
      words.push_back(word());
    } while (take(","));
    expect("}");
    return words;
  }
  double number() {
    const std::string_view from = rest();
    // The dots of a range are not a part of the number before them.
    const std::string_view digits = from.substr(0, from.find(".."));
    double value = 0;
    const auto [end, error] =
        std::from_chars(digits.data(), digits.data() + digits.size(), value);
    if (error != std::errc()) fail("expected a number");
    position_ += static_cast<size_t>(end - digits.data());
    return value;
  }
  [[noreturn]] void fail(const std::string& problem) const {
    throw InternalError(join("schema: ", problem, " at '",
                             text_.substr(position_), "' of '", text_, "'"));
  }

  std::string_view text_;
  size_t position_ = 0;
};

template <typename Items>
auto find_by_name(const Items& items, std::string_view name) {
  const auto found = std::ranges::find_if(
      items, [name](const auto& item) { return item.name == name; });
  return found == items.end() ? nullptr : &*found;
}

}  // namespace

bool Schema::sees_inputs() const {
  return std::ranges::any_of(outputs, [](const Operand& output) {
    return !output.memory.empty() && !output.written;
  });
}

const AttributeRule* Schema::attribute(std::string_view name) const {
  return find_by_name(attributes, name);
}

const Operand* Schema::input(std::string_view name) const {
  return find_by_name(inputs, name);
}

Schema parse_schema(std::string_view text) { return Parser(text).parse(); }

std::string_view name_of(Count count) {
  return kCountNames.at(static_cast<size_t>(count));
}

std::string_view name_of(AttributeType type) {
  return kTypeNames.at(static_cast<size_t>(type));
}

}  // namespace popsim::ops
