// Checks which ops write each tensor, and when other ops read it.
#include <algorithm>
#include <array>
#include <optional>

#include "ops/check.h"

namespace popsim::ops {
namespace {

using graph::Op;
using graph::Phase;
using graph::Tensor;
using graph::TensorId;
using graph::TensorKind;

constexpr size_t kPhases = 4;

// The reads and writes of one tensor's memory in one phase.
struct Uses {
  std::optional<int32_t> writer;       // stage of the writer
  std::optional<int32_t> last_reader;  // the reading stage that runs last
};

// Whether work on stage `a` is done before work on stage `b` begins, or the
// stages are the same. Forward runs the stages in ascending order, backward in
// descending order.
bool in_order(Phase phase, int32_t a, int32_t b) {
  switch (phase) {
    case Phase::kForward:
      return a <= b;
    case Phase::kBackward:
      return a >= b;
    case Phase::kSetup:
    case Phase::kUpdate:
      break;
  }
  return true;
}

class OrderCheck {
 public:
  OrderCheck(const graph::Graph& graph, bool in_flight)
      : graph_(graph), in_flight_(in_flight), uses_(graph.tensors().size()) {
    if (in_flight) find_changes();
  }

  void check(const Op& op) {
    const std::vector<bool> writes = writes_of(op);
    for (const TensorId id : op.inputs) {
      if (id != graph::kNoTensor) read(op, graph_.root(id));
    }
    for (size_t i = 0; i < op.outputs.size(); ++i) {
      if (writes[i]) write(op, graph_.root(op.outputs[i]));
    }
  }

 private:
  // For each output of an op, whether the op writes it; other outputs are only
  // views of an input.
  [[nodiscard]] static std::vector<bool> writes_of(const Op& op) {
    const bool sees_inputs = find_schema(op.kind).sees_inputs();
    std::vector<bool> writes;
    for (const TensorId id : op.outputs) {
      writes.push_back(id != graph::kNoTensor && !sees_inputs);
    }
    return writes;
  }

  // Finds the ops that change a variable in every micro-batch.
  void find_changes() {
    changes_.resize(uses_.size());
    for (const Op& op : graph_.ops()) {
      if (op.phase != Phase::kForward && op.phase != Phase::kBackward) continue;
      const std::vector<bool> writes = writes_of(op);
      for (size_t i = 0; i < writes.size(); ++i) {
        if (!writes[i]) continue;
        const TensorId root = graph_.root(op.outputs[i]);
        if (graph_.tensor(root).kind != TensorKind::kVariable) continue;
        changes_[static_cast<size_t>(root)] = &op;
      }
    }
  }

  // Whether other micro-batches may have changed a tensor that an op reads.
  [[nodiscard]] bool is_stale(const Op& op, TensorId root) const {
    if (!in_flight_ || op.phase == Phase::kUpdate) return false;
    const Op* change = changes_[static_cast<size_t>(root)];
    return change != nullptr &&
           (change->phase != op.phase || change->stage != op.stage);
  }

  [[nodiscard]] Uses& uses(TensorId root, Phase phase) {
    return uses_[static_cast<size_t>(root)][static_cast<size_t>(phase)];
  }
  [[nodiscard]] bool is_written(TensorId root) const {
    return std::ranges::any_of(
        uses_[static_cast<size_t>(root)],
        [](const Uses& of_phase) { return of_phase.writer.has_value(); });
  }

  void read(const Op& op, TensorId root) {
    const Tensor& tensor = graph_.tensor(root);
    const bool given =
        tensor.kind == TensorKind::kConstant ||
        (tensor.kind != TensorKind::kValue && op.phase != Phase::kSetup);
    check(op, given || is_written(root), "reads", tensor,
          "before it is written");
    check(op, !is_stale(op, root), "reads", tensor,
          "where other micro-batches may have changed it");
    Uses& here = uses(root, op.phase);
    check(op, !here.writer || in_order(op.phase, *here.writer, op.stage),
          "reads", tensor,
          "on a stage that runs before the one that writes it");
    if (!here.last_reader || !in_order(op.phase, op.stage, *here.last_reader)) {
      here.last_reader = op.stage;
    }
  }

  void write(const Op& op, TensorId root) {
    const Tensor& tensor = graph_.tensor(root);
    check(op,
          tensor.kind != TensorKind::kInput &&
              tensor.kind != TensorKind::kConstant,
          "writes", tensor, "which no op may change");
    Uses& here = uses(root, op.phase);
    // Several ops may change a variable one after the other: the body of a loop
    // updates weights, reads them, and updates them again.
    check(op,
          tensor.kind == TensorKind::kValue
              ? !is_written(root)
              : !here.writer || *here.writer == op.stage,
          "writes", tensor, "a second time");
    check(op,
          !here.last_reader || in_order(op.phase, *here.last_reader, op.stage),
          "writes", tensor, "before a later stage reads the old value");
    here.writer = op.stage;
  }

  static void check(const Op& op, bool condition, const char* what,
                    const Tensor& tensor, const char* problem) {
    check_internal(condition, "verify: ", op, ", ", name_of(op.phase),
                   ", stage ", op.stage, ", ", what, " '", tensor.name, "' ",
                   problem);
  }

  const graph::Graph& graph_;
  bool in_flight_;
  std::vector<const Op*> changes_;  // by root; set if micro-batches overlap
  std::vector<std::array<Uses, kPhases>> uses_;  // by root
};

}  // namespace

void check_order(const graph::Graph& graph, bool in_flight) {
  OrderCheck order(graph, in_flight);
  for (const Op& op : graph.ops()) {
    order.check(op);
    for (const auto& body : op.bodies) check_order(*body, false);
  }
}

}  // namespace popsim::ops
