#include "ops/check.h"

#include <algorithm>
#include <ranges>
#include <span>

#include "ops/schema.h"

namespace popsim::ops {
namespace {

using graph::Attribute;
using graph::Op;
using graph::Tensor;
using graph::TensorId;

// --- Attributes ---

template <typename T>
bool holds(const AttributeRule& rule, const Attribute& value) {
  if (!rule.is_list) return std::holds_alternative<T>(value);
  return std::holds_alternative<std::vector<T>>(value) || is_empty_list(value);
}

bool has_type(const AttributeRule& rule, const Attribute& value) {
  switch (rule.type) {
    case AttributeType::kBool:
      return std::holds_alternative<bool>(value);
    case AttributeType::kInt:
      return holds<int64_t>(rule, value);
    case AttributeType::kFloat:
      return holds<double>(rule, value);
    case AttributeType::kString:
    case AttributeType::kDType:
      return holds<std::string>(rule, value);
    case AttributeType::kArguments:
      return std::holds_alternative<graph::Arguments>(value);
  }
  return false;
}

// Whether the rule allows a number or string as the attribute's value.
struct Allowed {
  const AttributeRule& rule;

  bool operator()(const std::string& word) const {
    return rule.choices.empty() ||
           std::ranges::find(rule.choices, word) != rule.choices.end();
  }
  // NaN is in no range, so it is never allowed.
  bool operator()(double number) const {
    return (!rule.least || number >= *rule.least) &&
           (!rule.most || number <= *rule.most);
  }
  bool operator()(int64_t number) const {
    return (*this)(static_cast<double>(number));
  }
  bool operator()(bool /*value*/) const { return true; }
  bool operator()(const graph::Arguments& /*values*/) const { return true; }
  template <typename T>
  bool operator()(const std::vector<T>& values) const {
    const bool fits =
        !rule.length || static_cast<int64_t>(values.size()) == *rule.length;
    return fits && std::ranges::all_of(values, *this);
  }
};

std::string to_text(const Attribute& attribute) {
  return std::visit(
      [](const auto& value) {
        using T = std::decay_t<decltype(value)>;
        if constexpr (is_list<T> || std::is_same_v<T, graph::Arguments>) {
          return std::string("the values given");
        } else {
          return join("'", value, "'");
        }
      },
      attribute);
}

void check_attributes(const OpCall& op, const Schema& schema) {
  for (const auto& [name, value] : op.op().attributes) {
    const AttributeRule* rule = schema.attribute(name);
    op.require(rule != nullptr, "the op has an attribute '", name, "'");
    op.require(has_type(*rule, value), "attribute '", name, "' is a ",
               name_of(rule->type), rule->is_list ? "[]" : "");
    op.require(std::visit(Allowed{*rule}, value), "attribute '", name,
               "' allows ", to_text(value));
  }
  for (const AttributeRule& rule : schema.attributes) {
    op.require(
        rule.optional || rule.default_value || op.has_attribute(rule.name),
        "attribute '", rule.name, "' is given");
  }
}

// --- Inputs and outputs ---

using Ids = std::span<const TensorId>;

bool is_there(Ids ids, size_t i) {
  return i < ids.size() && ids[i] != graph::kNoTensor;
}

// The inputs and outputs of an op, or one set of them if the op has several
// sets.
struct OperandSet {
  const OpCall& op;
  const Schema& schema;
  Ids inputs;
  Ids outputs;

  // How many tensors a counted operand has.
  [[nodiscard]] size_t count(const std::string& counter) const {
    if (schema.attribute(counter) == nullptr) {
      const auto position = schema.input(counter) - schema.inputs.data();
      return is_there(inputs, static_cast<size_t>(position)) ? 1 : 0;
    }
    const auto found = op.op().attributes.find(counter);
    if (found == op.op().attributes.end()) return 0;
    if (const auto* number = std::get_if<int64_t>(&found->second)) {
      return static_cast<size_t>(*number);
    }
    if (const auto* flag = std::get_if<bool>(&found->second)) {
      return *flag ? 1 : 0;
    }
    return 1;
  }

  // For each of `total` tensors, the operand that it belongs to.
  [[nodiscard]] std::vector<const Operand*> bind(
      const std::vector<Operand>& operands, size_t total,
      std::string_view what) const {
    std::vector<const Operand*> bound;
    bool open = false;
    for (const Operand& operand : operands) {
      size_t tensors = 1;
      if (operand.count == Count::kCounted) {
        tensors = count(operand.counter);
        op.require(tensors <= total, "'", operand.counter, "' counts ", tensors,
                   " of the ", total, " ", what);
      }
      open = open || operand.count == Count::kAny;
      bound.insert(bound.end(), tensors, &operand);
    }
    while (bound.size() > total && bound.back()->count == Count::kOptional) {
      bound.pop_back();
    }
    if (open) {
      const auto list = std::ranges::find(bound, Count::kAny, &Operand::count);
      const Operand* operand = *list;
      const size_t fixed = bound.size() - 1;
      op.require(total >= fixed, "the op has at least ", fixed, " ", what,
                 " instead of ", total);
      bound.insert(bound.erase(list), total - fixed, operand);
    }
    op.require(bound.size() == total, "the op has ", bound.size(), " ", what,
               " instead of ", total);
    return bound;
  }

  void check(const std::vector<const Operand*>& bound, Ids ids,
             std::string_view what) const {
    for (size_t i = 0; i < ids.size(); ++i) {
      const Operand& operand = *bound[i];
      if (ids[i] == graph::kNoTensor) {
        op.require(operand.count == Count::kOptional || operand.has_gaps, what,
                   " ", i, " '", operand.name, "' is present");
        continue;
      }
      const DType dtype = op.graph().tensor(ids[i]).dtype;
      op.require(
          operand.dtypes.empty() ||
              std::ranges::find(operand.dtypes, dtype) != operand.dtypes.end(),
          what, " ", i, " '", operand.name, "' is not ", name_of(dtype));
    }
  }
};

std::vector<OperandSet> sets_of(const OpCall& op, const Schema& schema) {
  const size_t count =
      schema.repeats.empty()
          ? 1
          : static_cast<size_t>(op.attribute<int64_t>(schema.repeats));
  const Ids inputs(op.op().inputs);
  const Ids outputs(op.op().outputs);
  op.require(count <= inputs.size() + 1 && inputs.size() % count == 0 &&
                 outputs.size() % count == 0,
             "the op has the same number of inputs and of outputs for each of ",
             count, " parameters");
  std::vector<OperandSet> sets;
  for (size_t i = 0; i < count; ++i) {
    const size_t in = inputs.size() / count;
    const size_t out = outputs.size() / count;
    sets.push_back({op, schema, inputs.subspan(i * in, in),
                    outputs.subspan(i * out, out)});
  }
  return sets;
}

void check_inputs(const OpCall& op, const Schema& schema) {
  check_attributes(op, schema);
  for (const OperandSet& set : sets_of(op, schema)) {
    set.check(set.bind(schema.inputs, set.inputs.size(), "inputs"), set.inputs,
              "input");
  }
}

// --- Types and memory of outputs ---

void check_type(const OpView& op, size_t i, const TensorType& expected) {
  if (!op.has_output(i)) return;
  const Tensor& out = op.output(i);
  if (expected.state == TensorType::State::kUnknown) return;
  op.require(expected.state == TensorType::State::kKnown, "output ", i,
             " is left out, because the inputs that it needs are left out");
  check_internal(out.dtype == expected.dtype && out.shape == expected.shape,
                 op.op(), ": output ", i, " is ", name_of(out.dtype),
                 to_string(out.shape), ", its shape rule gives ",
                 name_of(expected.dtype), to_string(expected.shape));
}

void check_layout(const OpView& op, size_t i, OutputLayout layout) {
  if (!op.has_output(i)) return;
  const Tensor& out = op.output(i);
  switch (layout) {
    case OutputLayout::kContiguous:
      return op.require(out.contiguous(), "output ", i, " is contiguous");
    case OutputLayout::kImage:
      return op.require(
          out.contiguous() || is_channels_last(out.shape, out.strides),
          "output ", i, " is contiguous or has its channels last");
    case OutputLayout::kAny:
      return op.require(is_injective(out.shape, out.strides), "output ", i,
                        " has its own place in memory for each value");
  }
}

// Checks which tensors share the memory of an op's outputs.
class MemoryCheck {
 public:
  MemoryCheck(const OpView& op, bool reuses_input)
      : op_(op), reuses_input_(reuses_input) {
    for (const TensorId id : op.op().inputs) note(id, inputs_);
    for (const TensorId id : op.op().outputs) note(id, outputs_);
    std::ranges::sort(inputs_);
    std::ranges::sort(outputs_);
  }

  void check(const OperandSet& set) const {
    const auto outputs =
        set.bind(set.schema.outputs, set.outputs.size(), "outputs");
    const auto inputs =
        set.bind(set.schema.inputs, set.inputs.size(), "inputs");
    for (size_t i = 0; i < outputs.size(); ++i) {
      const TensorId id = set.outputs[i];
      if (id == graph::kNoTensor) continue;
      const TensorId root = op_.graph().root(id);
      const std::string& letter = outputs[i]->memory;
      if (!letter.empty()) {
        const auto shared = std::ranges::find(inputs, letter, &Operand::memory);
        const auto position = static_cast<size_t>(shared - inputs.begin());
        op_.require(is_same(set.inputs[position], id), "output ", i,
                    " is the same memory as input ", position);
      }
      op_.require(
          count(outputs_, root) == 1 &&
              (letter.empty() ? is_free(id, root) : count(inputs_, root) == 1),
          "output '", op_.graph().tensor(id).name,
          "' shares memory with no other input or output of the op");
    }
  }

 private:
  using Roots = std::vector<TensorId>;

  void note(TensorId id, Roots& roots) const {
    if (id != graph::kNoTensor) roots.push_back(op_.graph().root(id));
  }
  [[nodiscard]] static size_t count(const Roots& roots, TensorId root) {
    return std::ranges::equal_range(roots, root).size();
  }
  [[nodiscard]] bool is_same(TensorId input, TensorId output) const {
    const Tensor& in = op_.graph().tensor(input);
    const Tensor& out = op_.graph().tensor(output);
    return op_.graph().root(input) == op_.graph().root(output) &&
           in.shape == out.shape && in.strides == out.strides &&
           in.offset == out.offset && in.dtype == out.dtype;
  }
  // Whether the op reads nothing from that memory, or only an input that it may
  // overwrite.
  [[nodiscard]] bool is_free(TensorId output, TensorId root) const {
    if (count(inputs_, root) == 0) return true;
    return reuses_input_ &&
           std::ranges::all_of(op_.op().inputs, [&](TensorId input) {
             return input == graph::kNoTensor ||
                    op_.graph().root(input) != root || is_same(input, output);
           });
  }

  const OpView& op_;
  bool reuses_input_;
  Roots inputs_;
  Roots outputs_;
};

// The types that the shape rule returns; error messages name the op.
std::vector<TensorType> types_of(const OpView& op, const OpDef& def) {
  try {
    return def.shape(op);
  } catch (const OpError&) {
    throw;
  } catch (const InternalError& error) {
    throw InternalError(join(op.op(), ": ", error.what()));
  } catch (const UserError& error) {
    throw UserError(join(op.op(), ": ", error.what()));
  }
}

void check_types(const OpView& op, const OpDef& def) {
  std::vector<TensorType> types = types_of(op, def);
  if (!types.empty() && types.back().state == TensorType::State::kUnknown) {
    types.resize(op.num_outputs(), types.back());
  }
  op.require(op.num_outputs() <= types.size(), "the op has at most ",
             types.size(), " outputs instead of ", op.num_outputs());
  for (size_t i = 0; i < op.num_outputs(); ++i) check_type(op, i, types[i]);
}

void check_op(const OpView& op, bool types) {
  const OpDef& def = find_op(op.op().kind);
  const Schema& schema = find_schema(op.op().kind);
  check_inputs(op, schema);
  const std::vector<OperandSet> sets = sets_of(op, schema);
  for (const OperandSet& set : sets) {
    set.check(set.bind(schema.outputs, set.outputs.size(), "outputs"),
              set.outputs, "output");
  }
  if (types) check_types(op, def);
  const MemoryCheck memory(op, def.reuses_input);
  for (const OperandSet& set : sets) memory.check(set);
  if (schema.sees_inputs()) return;
  for (size_t i = 0; i < op.num_outputs(); ++i) {
    check_layout(op, i, def.outputs);
  }
}

}  // namespace

void verify(const graph::Graph& graph, bool in_flight, bool types) {
  graph::verify(graph);
  check_ops(graph, types);
  check_order(graph, in_flight && graph.num_stages() > 1);
}

void check_ops(const graph::Graph& graph, bool types) {
  for (const Op& op : graph.ops()) {
    for (const auto& body : op.bodies) check_ops(*body, types);
    check_op(OpView(graph, op), types);
  }
}

std::vector<TensorType> infer_types(const OpCall& op) {
  check_inputs(op, find_schema(op.op().kind));
  return find_op(op.op().kind).shape(op);
}

}  // namespace popsim::ops
