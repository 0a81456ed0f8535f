// What an op is: one entry of the registry, and the kernel it prepares.
//
// A kernel is prepared once, when the program is compiled; there it looks at
// shapes, parses attributes, picks algorithms and allocates its scratch
// memory. run() then only computes.
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

// Shape and element type of an op's output.
struct TensorType {
  DType dtype = DType::kFloat32;
  Shape shape;
  // kAbsent: no such output, as the inputs that it would need are not there.
  // kUnknown: of this output and all after it, only a run tells.
  enum class State : int8_t { kKnown, kAbsent, kUnknown };
  State state = State::kKnown;

  [[nodiscard]] static TensorType none() { return {{}, {}, State::kAbsent}; }
  [[nodiscard]] static TensorType unknown() {
    return {{}, {}, State::kUnknown};
  }
};

// A rule that an op breaks; the message names the op.
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

// The inputs and attributes of an op: what its results' types follow from.
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
  // Whether the attribute is given; one with a default need not be.
  [[nodiscard]] bool has_attribute(std::string_view name) const {
    return op_.attributes.find(name) != op_.attributes.end();
  }
  // What is given, or the default that the schema states. Throws InternalError
  // where there is neither, or a value of another type.
  template <typename T>
  [[nodiscard]] const T& attribute(std::string_view name) const {
    const graph::Attribute& given = find_attribute(name);
    const T* value = std::get_if<T>(&given);
    if constexpr (is_list<T>) {
      // An empty list from Python does not say what it would hold.
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
  // All inputs that are there have one element type.
  void require_one_dtype() const;
  // The input can be seen with this shape.
  void require_broadcasts(size_t input, const Shape& shape) const;

 private:
  [[nodiscard]] const graph::Attribute& find_attribute(
      std::string_view name) const;
  [[noreturn]] void fail(const std::string& rule) const;

  const graph::Graph& graph_;
  const graph::Op& op_;
};

// An op together with the graph it stands in, and with its bodies where it is
// to be prepared.
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

// One type per output that the op may have, whether somebody reads it or not.
using ShapeRule = std::vector<TensorType> (*)(const OpCall&);
using PrepareFn = std::unique_ptr<Kernel> (*)(const OpView&);

// How the outputs of an op may lie in memory.
enum class OutputLayout : int8_t {
  kContiguous,
  kImage,  // or with the channels last (operands/image_layout.h)
  kAny,    // any strides under which no two elements are one
};

using WorkRule = std::vector<graph::Work> (*)(const OpView&);

struct OpDef {
  std::string_view name;
  std::string_view schema;  // schema.h says how to read it
  std::string_view family;  // folder of csrc/ops
  ShapeRule shape;
  PrepareFn prepare;
  // The arithmetic, and the bytes moved where those are not all inputs and
  // outputs (work.h).
  WorkRule work;
  // The first output may be written over an input of the same size whose last
  // reader is this op.
  bool reuses_input = false;
  // The first micro-batch of a device iteration writes the outputs whole: what
  // an iteration before left in them does not count.
  bool begins_anew = false;
  OutputLayout outputs = OutputLayout::kContiguous;
  // The results are as good computed once more as kept: that takes little more
  // than reading the inputs.
  bool cheap = false;
  // A product or the like: what uses its results belongs to the next layer.
  bool layer = false;
  // Its results are its operands' numbers unchanged, or its operands have the
  // type of its results already: there is nothing to round at random.
  bool exact = false;
  // Its results have an element for each of its operands', in their order.
  bool elementwise = false;
  // Does nothing but multiply and add up, or move numbers: a result that is
  // infinite where no operand is has overflowed.
  bool only_overflows = false;
  // Its results come from the host, which may fail and take any time.
  bool calls_host = false;
};

// Throws InternalError for a name without an entry.
[[nodiscard]] const OpDef& find_op(std::string_view name);
[[nodiscard]] const Schema& find_schema(std::string_view name);
[[nodiscard]] std::span<const OpDef* const> all_ops();

}  // namespace popsim::ops
