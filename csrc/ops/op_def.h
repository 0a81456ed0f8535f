// The definition of an op: one entry of the registry, and the kernel that it
// prepares.
//
// A kernel is prepared once, when the program is compiled: it then checks
// shapes, parses attributes, chooses algorithms and allocates its scratch
// memory. run() only computes.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "graph/graph.h"
#include "graph/work.h"
#include "ops/body.h"
#include "ops/run_context.h"
#include "ops/schema.h"

namespace popsim::ops {

// Shape and dtype of an op's output.
struct TensorType {
  DType dtype = DType::kFloat32;
  Shape shape;
  // kAbsent: the output does not exist, because the inputs that it needs are
  // left out. kUnknown: only a run determines the type of this output and of
  // all outputs after it.
  enum class State : int8_t { kKnown, kAbsent, kUnknown };
  State state = State::kKnown;

  [[nodiscard]] static TensorType none() { return {{}, {}, State::kAbsent}; }
  [[nodiscard]] static TensorType unknown() {
    return {{}, {}, State::kUnknown};
  }
};

// Thrown if an op breaks a rule; the message names the op.
class OpError : public InternalError {
 public:
  using InternalError::InternalError;
};

class Kernel {
 public:
  Kernel() = default;
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;
  virtual ~Kernel() = default;

  virtual void run(const RunContext& context) = 0;
  // Tensors that run() asks for through RunContext::tensor().
  [[nodiscard]] virtual std::vector<graph::TensorId> at_tensors() const {
    return {};
  }
};

template <typename T>
inline constexpr bool is_list = false;
template <typename T>
inline constexpr bool is_list<std::vector<T>> = true;

[[nodiscard]] bool is_empty_list(const graph::Attribute& attribute);

// The inputs and attributes of an op, which determine the types of its results.
class OpCall {
 public:
  OpCall(const graph::Graph& graph, const graph::Op& op)
      : graph_(graph), op_(op) {}

  [[nodiscard]] const graph::Op& op() const { return op_; }
  [[nodiscard]] const graph::Graph& graph() const { return graph_; }
  [[nodiscard]] size_t num_inputs() const { return op_.inputs.size(); }
  [[nodiscard]] bool has_input(size_t i) const {
    return i < op_.inputs.size() && op_.inputs[i] != graph::kNoTensor;
  }
  [[nodiscard]] const graph::Tensor& input(size_t i) const;
  [[nodiscard]] graph::TensorId input_id(size_t i) const;
  [[nodiscard]] TensorType input_type(size_t i) const {
    return {input(i).dtype, input(i).shape};
  }
  // Whether the attribute is given; an attribute with a default may be left
  // out.
  [[nodiscard]] bool has_attribute(std::string_view name) const {
    return op_.attributes.find(name) != op_.attributes.end();
  }
  // The given value, or the default of the schema. Throws InternalError if
  // there is neither, or if the value has another type.
  template <typename T>
  [[nodiscard]] const T& attribute(std::string_view name) const {
    const graph::Attribute& given = find_attribute(name);
    const T* value = std::get_if<T>(&given);
    if constexpr (is_list<T>) {
      // An empty list from Python has no type.
      static const T empty;
      if (value == nullptr && is_empty_list(given)) return empty;
    }
    require(value != nullptr, "attribute '", name,
            "' has the type that the kernel reads");
    return *value;
  }

  // Throws OpError with the op, the rule and the inputs' types.
  template <typename... Parts>
  void require(bool condition, const Parts&... rule) const {
    if (!condition) fail(join(rule...));
  }
  void require_rank(size_t input, size_t rank) const;
  void require_shape(size_t input, const Shape& shape) const;
  void require_contiguous(size_t input) const;
  // All inputs that are given must have the same dtype.
  void require_one_dtype() const;
  // The input must be broadcastable to this shape.
  void require_broadcasts(size_t input, const Shape& shape) const;

 private:
  [[nodiscard]] const graph::Attribute& find_attribute(
      std::string_view name) const;
  [[noreturn]] void fail(const std::string& rule) const;

  const graph::Graph& graph_;
  const graph::Op& op_;
};

// An op together with the graph that contains it, and with its bodies if the op
// is about to be prepared.
class OpView : public OpCall {
 public:
  OpView(const graph::Graph& graph, const graph::Op& op,
         std::span<BodyRunner* const> bodies = {})
      : OpCall(graph, op), bodies_(bodies) {}

  [[nodiscard]] BodyRunner& body(size_t i) const {
    require(i < bodies_.size(), "the op has a body ", i);
    return *bodies_[i];
  }

  [[nodiscard]] size_t num_outputs() const { return op().outputs.size(); }
  [[nodiscard]] bool has_output(size_t i) const {
    return i < op().outputs.size() && op().outputs[i] != graph::kNoTensor;
  }
  [[nodiscard]] const graph::Tensor& output(size_t i) const;
  [[nodiscard]] graph::TensorId output_id(size_t i) const;

 private:
  std::span<BodyRunner* const> bodies_;
};

// One type per output that the op may have, whether or not it is read.
using ShapeRule = std::vector<TensorType> (*)(const OpCall&);
using PrepareFn = std::unique_ptr<Kernel> (*)(const OpView&);

// The orders in memory that the outputs of an op may have.
enum class OutputLayout : int8_t {
  kContiguous,
  kImage,  // contiguous, or channels last (operands/image_layout.h)
  kAny,    // any strides that give each element its own place
};

using WorkRule = std::vector<graph::Work> (*)(const OpView&);

struct OpDef {
  std::string_view name;
  std::string_view schema;  // see schema.h for the format
  std::string_view family;  // folder of csrc/ops
  ShapeRule shape;
  PrepareFn prepare;
  // The arithmetic, and the bytes moved if these are not all inputs and outputs
  // (work.h).
  WorkRule work;
  // The first output may overwrite an input of the same size if this op is the
  // last reader of that input.
  bool reuses_input = false;
  // The first micro-batch of a device iteration writes the whole outputs:
  // values of earlier iterations are not used.
  bool begins_anew = false;
  OutputLayout outputs = OutputLayout::kContiguous;
  // Computing the results again is as good as keeping them, because it takes
  // little more time than reading the inputs.
  bool cheap = false;
  // A product or a similar op: the ops that use its results belong to the next
  // layer.
  bool layer = false;
  // The results are numbers of the operands, unchanged, or the operands already
  // have the dtype of the results: stochastic rounding has nothing to round.
  bool exact = false;
  // The results have one element for each element of the operands, in the same
  // order.
  bool elementwise = false;
  // The op only multiplies, adds up, or moves numbers: if a result is infinite
  // and no operand is, the op has overflowed.
  bool only_overflows = false;
  // The results come from the host, which may fail and may take any time.
  bool calls_host = false;
  // The ops of a run must come in the order of the whole schedule, on the
  // thread of the caller, because of what they do besides computing results.
  bool in_order = false;
};

// Throws InternalError if no entry has this name.
[[nodiscard]] const OpDef& find_op(std::string_view name);
[[nodiscard]] const Schema& find_schema(std::string_view name);
[[nodiscard]] std::span<const OpDef* const> all_ops();

}  // namespace popsim::ops
