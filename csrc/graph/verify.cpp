#include <algorithm>

#include "base/check.h"
#include "graph/graph.h"

namespace popsim::graph {
namespace {

// A limit, because actions and blocks are lists over stages.
constexpr int32_t kMaxStages = 1 << 16;
// A limit, because recursive functions visit the bodies.
constexpr int kMaxDepth = 64;

void verify_view(const Graph& graph, const Tensor& view) {
  check_internal(
      graph.has(view.base) && graph.tensor(view.base).kind != TensorKind::kView,
      "verify: the base of view '", view.name,
      "' must be a tensor that owns memory");
  const Tensor& base = graph.tensor(view.base);
  check_internal(std::ranges::all_of(
                     view.strides, [](int64_t stride) { return stride >= 0; }),
                 "verify: view '", view.name, "' has a negative stride");
  check_internal(can_view(base.dtype, view.dtype), "verify: view '", view.name,
                 "' has another dtype than its base");
  check_internal(lies_within(view.shape, view.strides, view.offset,
                             base.bytes() / size_in_bytes(view.dtype)),
                 "verify: view '", view.name, "' ",
                 popsim::to_string(view.shape),
                 " reaches outside of its base '", base.name, "' ",
                 popsim::to_string(base.shape));
}

void verify_tensor(const Graph& graph, const Tensor& t) {
  check_internal(is_valid_shape(t.shape), "verify: tensor '", t.name,
                 "' has sizes that are negative or too large, ",
                 popsim::to_string(t.shape));
  check_internal(t.shape.size() == t.strides.size(), "verify: tensor '", t.name,
                 "' must have one stride for each axis");
  if (t.kind == TensorKind::kView) {
    verify_view(graph, t);
    return;
  }
  check_internal(t.contiguous(), "verify: tensor '", t.name,
                 "' owns memory and must be contiguous");
  check_internal(t.base == kNoTensor && t.offset == 0, "verify: tensor '",
                 t.name, "' owns memory and must have no base");
}

void verify_op(const Graph& graph, const Op& op, Phase phase_before) {
  for (const auto* ids : {&op.inputs, &op.outputs}) {
    for (const TensorId id : *ids) {
      check_internal(id == kNoTensor || graph.has(id), "verify: ", op,
                     " uses tensor ", id, ", which does not exist");
    }
  }
  check_internal(op.stage >= 0 && op.stage < kMaxStages, "verify: ", op,
                 " is on stage ", op.stage);
  check_internal(op.phase >= phase_before, "verify: ", op, " (",
                 name_of(op.phase), ") comes after a later phase");
}

void verify_graph(const Graph& graph, int depth);

// A body is one sequence of ops that keeps no tensors between its runs.
void verify_body(const Op& owner, const Graph& body, int depth) {
  check_internal(depth <= kMaxDepth, "verify: ", owner, " is nested more than ",
                 kMaxDepth, " deep");
  verify_graph(body, depth);
  for (const Tensor& t : body.tensors()) {
    check_internal(
        t.kind != TensorKind::kConstant && t.kind != TensorKind::kVariable,
        "verify: '", t.name, "' in a body of ", owner,
        " is a constant or a variable; a body cannot keep tensors between "
        "runs");
  }
  const std::vector<TensorId>& results = results_of(body);
  for (const Op& op : body.ops()) {
    check_internal(op.phase == Phase::kForward && op.stage == 0, "verify: ", op,
                   " is in a body and must be on stage 0 of the forward phase, "
                   "but is on stage ",
                   op.stage, " of ", name_of(op.phase));
    check_internal((op.kind == kYield) == (&op == &body.ops().back()),
                   "verify: '", op.name,
                   "': a body must end with its only yield");
  }
  for (auto result = results.begin(); result != results.end(); ++result) {
    check_internal(*result != kNoTensor &&
                       body.tensor(*result).kind == TensorKind::kValue &&
                       std::find(results.begin(), result, *result) == result,
                   "verify: a result of a body of ", owner,
                   " is not a value with its own memory");
  }
}

void verify_graph(const Graph& graph, int depth) {
  for (const Tensor& t : graph.tensors()) verify_tensor(graph, t);
  Phase phase = Phase::kSetup;
  for (const Op& op : graph.ops()) {
    verify_op(graph, op, phase);
    phase = op.phase;
    check_internal(op.bodies.empty() || op.phase != Phase::kSetup,
                   "verify: ", op,
                   " has bodies, so it cannot run in the setup phase");
    for (const auto& body : op.bodies) verify_body(op, *body, depth + 1);
  }
}

}  // namespace

void verify(const Graph& graph) { verify_graph(graph, 0); }

}  // namespace popsim::graph
