// A listener that ends a run at the first op whose arithmetic fails: by an
// invalid operation, a division by zero or an overflow.
//
// Only results count, not the numbers that a kernel computes on the way. An op
// fails if it computes NaN from numbers, or infinity from finite numbers. It
// may pass on NaN and infinity from its operands and attributes.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "graph/graph.h"
#include "runtime/listener.h"

namespace popsim::runtime {

class NumberWatch final : public Listener {
 public:
  // The graph must outlive the watch.
  explicit NumberWatch(const graph::Graph& graph);

  // Checks the operands before the op runs, because the op may overwrite them.
  void before(const graph::Op& op, const ops::RunContext& context) override;
  // Throws UserError with the op, its source line in the model, the result and
  // the kind of failure.
  void after(const graph::Op& op, const ops::RunContext& context) override;
  [[nodiscard]] Listener* of_body(const graph::Graph& body) override {
    return bodies_.at(&body).get();
  }

 private:
  // How the results of an op are compared with its operands.
  enum class Rule : int8_t {
    kNone,         // the op computes nothing
    kElementwise,  // each value with the values it was computed from
    kWhole,        // any value with all operands
    kComparison,   // only the operands are checked: none may be NaN
  };
  // The NaN and infinities among the operands.
  struct Known {
    bool nan = false;
    bool infinity = false;
  };

  [[nodiscard]] Rule rule_of(const graph::Op& op) const;
  [[nodiscard]] Rule rule(const graph::Op& op) const {
    return rules_[static_cast<size_t>(&op - graph_.ops().data())];
  }
  [[nodiscard]] at::Tensor value(graph::TensorId id,
                                 const ops::RunContext& context) const;
  // Whether the op overwrites the input without reading it.
  [[nodiscard]] bool is_overwritten(const graph::Op& op, graph::TensorId input,
                                    const ops::RunContext& context) const;
  void check(const graph::Op& op, graph::TensorId result,
             const at::Tensor& values) const;
  // Clears the places in `bad` at which an operand had such a value already.
  [[nodiscard]] at::Tensor without_inherited(
      const at::Tensor& bad, at::Tensor (*is_bad)(const at::Tensor&)) const;
  // The reason why a value of an op's result is infinite.
  [[nodiscard]] std::string cause_of_infinity(const graph::Op& op,
                                              const at::Tensor& bad) const;

  const graph::Graph& graph_;
  std::vector<Rule> rules_;  // by op
  std::unordered_map<const graph::Graph*, std::unique_ptr<NumberWatch>> bodies_;
  // What the operands of the current op hold.
  Known known_;
  std::vector<at::Tensor> operands_;  // copies, for elementwise ops
};

}  // namespace popsim::runtime
