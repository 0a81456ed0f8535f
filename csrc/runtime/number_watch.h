// A listener that ends a run at the first op whose arithmetic fails: an invalid
// operation, a division by zero or an overflow.
//
// What counts are results, not what a kernel does on the way to them: an op
// fails where it makes NaN out of numbers, or an infinity out of finite ones.
// What it was given, also as an attribute, it may hand on.
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
  // The graph is to outlive the watch.
  explicit NumberWatch(const graph::Graph& graph);

  // Looks at the operands: the op may write over them.
  void before(const graph::Op& op, const ops::RunContext& context) override;
  // Throws UserError with the op, its line in the model, the result and the
  // kind of failure.
  void after(const graph::Op& op, const ops::RunContext& context) override;
  [[nodiscard]] Listener* of_body(const graph::Graph& body) override {
    return bodies_.at(&body).get();
  }

 private:
  // How an op's results are compared with its operands.
  enum class Rule : int8_t {
    kNone,         // it computes nothing
    kElementwise,  // each element with those that it was computed from
    kWhole,        // any element with all of the operands
    kComparison,   // operands alone: none may be NaN
  };
  // What was there before.
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
  // Whether the op is to write the input without reading it.
  [[nodiscard]] bool is_overwritten(const graph::Op& op, graph::TensorId input,
                                    const ops::RunContext& context) const;
  void check(const graph::Op& op, graph::TensorId result,
             const at::Tensor& values) const;
  // Elements of `bad` that stand for an operand that was like that already are
  // taken out.
  [[nodiscard]] at::Tensor without_inherited(
      const at::Tensor& bad, at::Tensor (*is_bad)(const at::Tensor&)) const;
  // What makes an element of an op's result infinite.
  [[nodiscard]] std::string cause_of_infinity(const graph::Op& op,
                                              const at::Tensor& bad) const;

  const graph::Graph& graph_;
  std::vector<Rule> rules_;  // by op
  std::unordered_map<const graph::Graph*, std::unique_ptr<NumberWatch>> bodies_;
  // What the operands of the op that runs hold.
  Known known_;
  std::vector<at::Tensor> operands_;  // copies, for elementwise ops
};

}  // namespace popsim::runtime
