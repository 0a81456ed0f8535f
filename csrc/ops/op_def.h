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
#include "ops/run_context.h"

namespace popsim::ops {

// Shape and element type of an op's output.
struct TensorType {
  DType dtype;
  Shape shape;
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

// An op together with the graph it stands in.
class OpView {
 public:
  // `index`: position of the op in the graph; random ops key their numbers
  // with it.
  OpView(const graph::Graph& graph, const graph::Op& op, int64_t index)
      : graph_(graph), op_(op), index_(index) {}

  [[nodiscard]] const graph::Op& op() const { return op_; }
  [[nodiscard]] const graph::Graph& graph() const { return graph_; }
  [[nodiscard]] int64_t index() const { return index_; }
  [[nodiscard]] size_t num_inputs() const { return op_.inputs.size(); }
  [[nodiscard]] size_t num_outputs() const { return op_.outputs.size(); }
  [[nodiscard]] bool has_input(size_t i) const {
    return i < op_.inputs.size() && op_.inputs[i] != graph::kNoTensor;
  }
  [[nodiscard]] const graph::Tensor& input(size_t i) const;
  [[nodiscard]] const graph::Tensor& output(size_t i) const;
  [[nodiscard]] graph::TensorId input_id(size_t i) const;
  [[nodiscard]] graph::TensorId output_id(size_t i) const;
  [[nodiscard]] bool has_attribute(std::string_view name) const {
    return op_.attributes.find(name) != op_.attributes.end();
  }
  // Throws InternalError when the attribute is missing or of another type.
  template <typename T>
  [[nodiscard]] const T& attribute(std::string_view name) const {
    const auto found = op_.attributes.find(name);
    check_internal(found != op_.attributes.end(), op_.kind, " '", op_.name,
                   "': attribute '", name, "' is missing");
    const T* value = std::get_if<T>(&found->second);
    if constexpr (is_list<T>) {
      // An empty list from Python does not say what it would hold.
      static const T empty;
      if (value == nullptr && is_empty_list(found->second)) return empty;
    }
    check_internal(value != nullptr, op_.kind, " '", op_.name, "': attribute '",
                   name, "' has another type");
    return *value;
  }

 private:
  const graph::Graph& graph_;
  const graph::Op& op_;
  int64_t index_;
};

using ShapeRule = std::vector<TensorType> (*)(const OpView&);
using PrepareFn = std::unique_ptr<Kernel> (*)(const OpView&);

struct OpDef {
  std::string_view name;
  std::string_view schema;  // for people and for the docs page of ops
  ShapeRule shape;
  PrepareFn prepare;
  // The first output may be written over an input of the same size whose last
  // reader is this op.
  bool reuses_input = false;
  // The first micro-batch of a device iteration writes the outputs whole: what
  // an iteration before left in them does not count.
  bool begins_anew = false;
};

// Throws InternalError for a name without an entry.
[[nodiscard]] const OpDef& find_op(std::string_view name);
[[nodiscard]] std::span<const OpDef* const> all_ops();
// Throws InternalError when the op's outputs differ from its shape rule.
void check_types(const OpView& op);

}  // namespace popsim::ops
