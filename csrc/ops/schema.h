// The signature of an op as data, parsed from the string in its entry:
//
//   sgd_update(Tensor(a!){floats} weight, Tensor{floats} gradient,
//              Tensor{float32} rate, Tensor{float32}[max_grad_norm] norm, *,
//              float? max_grad_norm) -> Tensor(a!) weight
//
// The inputs are before the `*`, the attributes after it, and the outputs after
// the arrow. Inputs and outputs:
//   Tensor         one
//   Tensor?        one that may be left out: kNoTensor, or nothing at the end
//   Tensor[]       any number; Tensor?[]: any of them may be left out
//   Tensor[name]   the attribute `name` is the number of tensors; true and a
//                  float count as 1; if `name` is an input, the number is 1 if
//                  that input is given, else 0
//   Tensor(a)      an output with the letter of an input is a view of that
//                  input; with (a!) the op writes to it
//   Tensor{...}    has one of these dtypes; `floats` and `indices` are names of
//                  several dtypes
// Attributes are bool, int, float, str, dtype (the name of a dtype) and
// arguments (of an ATen operator):
//   int?           may be left out
//   int[], int[2]  a list, of any length or of this one
//   int{1..}       at least 1; 0..1: from 0 to 1
//   str{a, b}      one of these strings; the same for dtype
//   int n=1        1 if it is left out
// name[n](...): the attribute n says how many sets of inputs and outputs there
// are, one set after the other.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.h"
#include "graph/graph.h"

namespace popsim::ops {

enum class Count : int8_t { kOne, kOptional, kAny, kCounted };

// An input or output, or several consecutive ones.
struct Operand {
  std::string name;
  Count count = Count::kOne;
  bool has_gaps = false;      // kAny: some of them may be left out
  std::string counter;        // kCounted: the attribute or input with the count
  std::vector<DType> dtypes;  // empty: all dtypes
  std::string memory;         // letter; empty: its own memory
  bool written = false;       // the op writes the memory with that letter
};

enum class AttributeType : int8_t {
  kBool,
  kInt,
  kFloat,
  kString,
  kDType,
  kArguments
};

struct AttributeRule {
  std::string name;
  AttributeType type = AttributeType::kBool;
  bool is_list = false;
  std::optional<int64_t> length;  // of a list
  bool optional = false;
  std::vector<std::string> choices;  // empty: any
  std::optional<double> least;
  std::optional<double> most;
  std::optional<graph::Attribute> default_value;
};

struct Schema {
  std::string name;
  std::string repeats;  // attribute with the number of sets; empty: one set
  std::vector<Operand> inputs;
  std::vector<AttributeRule> attributes;
  std::vector<Operand> outputs;

  // Whether the outputs are inputs that the op does not change.
  [[nodiscard]] bool sees_inputs() const;
  // Returns nullptr for an unknown name.
  [[nodiscard]] const AttributeRule* attribute(std::string_view name) const;
  [[nodiscard]] const Operand* input(std::string_view name) const;
};

// Throws InternalError that shows where the string is not a schema.
[[nodiscard]] Schema parse_schema(std::string_view text);

[[nodiscard]] std::string_view name_of(Count count);
[[nodiscard]] std::string_view name_of(AttributeType type);

}  // namespace popsim::ops
