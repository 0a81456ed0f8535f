#include "runtime/checkpoint.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "ops/op_def.h"
#include "runtime/closed_memory.h"

namespace popsim::runtime {
namespace {

using graph::Op;
using graph::Phase;
using graph::TensorId;

// If a stop is requested, shorter iterations run to their end.
constexpr std::chrono::milliseconds kLong{200};

// How the micro-batches of a device iteration use the variables.
class VariableUse {
 public:
  explicit VariableUse(const graph::Graph& graph)
      : changed(graph.tensors().size()),
        read_first(changed.size()),
        graph_(graph),
        overwritten_(changed.size()) {
    for (const Op& op : graph.ops()) {
      if (op.phase == Phase::kForward || op.phase == Phase::kBackward) add(op);
    }
  }

  // By TensorId.
  std::vector<bool> changed;
  std::vector<bool> read_first;  // read before all of the variable is written

 private:
  void add(const Op& op) {
    const bool begins_anew = ops::find_op(op.kind).begins_anew;
    for (const TensorId id : op.inputs) {
      if (id == graph::kNoTensor || (begins_anew && writes(op, id))) continue;
      const size_t root = root_of(id);
      if (!overwritten_[root]) read_first[root] = true;
    }
    for (const TensorId id : op.outputs) {
      if (id == graph::kNoTensor) continue;
      const size_t root = root_of(id);
      if (graph_.tensors()[root].kind != graph::TensorKind::kVariable) continue;
      changed[root] = changed[root] || !begins_anew;
      if (graph_.tensor(id).numel() == graph_.tensors()[root].numel()) {
        overwritten_[root] = true;
      } else if (!overwritten_[root]) {
        read_first[root] = true;
      }
    }
  }

  [[nodiscard]] bool writes(const Op& op, TensorId id) const {
    return std::ranges::any_of(op.outputs, [&](TensorId out) {
      return out != graph::kNoTensor && root_of(out) == root_of(id);
    });
  }

  [[nodiscard]] size_t root_of(TensorId id) const {
    return static_cast<size_t>(graph_.root(id));
  }

  const graph::Graph& graph_;
  std::vector<bool> overwritten_;
};

// Whether an iteration may fail in the middle or take any time: the program
// calls the host, or has a loop that ends when a value says so.
bool is_open_ended(const graph::Graph& graph) {
  return std::ranges::any_of(graph.ops(), [&graph](const Op& op) {
    return ops::find_op(op.kind).calls_host ||
           (op.kind == "loop" &&
            ops::OpCall(graph, op).attribute<bool>("conditional")) ||
           std::ranges::any_of(op.bodies, [](const auto& body) {
             return is_open_ended(*body);
           });
  });
}

}  // namespace

Checkpoint::Checkpoint(const Plan& plan)
    : plan_(plan),
      graph_(plan.graph()),
      always_(plan.waits_in_iteration() || plan.updates_in_iteration() ||
              is_open_ended(graph_) || plan.checks_numbers()) {
  VariableUse use(graph_);
  changed_ = std::move(use.changed);
  for (size_t i = 0; i < changed_.size(); ++i) {
    if (use.read_first[i]) add_if_changed(static_cast<TensorId>(i));
  }
}

void Checkpoint::add_if_changed(TensorId id) {
  const TensorId root = graph_.root(id);
  if (!changed_[static_cast<size_t>(root)]) return;
  tensors_.push_back(root);
  changed_[static_cast<size_t>(root)] = false;
  copy_.reset();
}

void Checkpoint::begin(const Memories& memories) {
  if (tensors_.empty()) return;
  const Clock::time_point now = Clock::now();
  const bool is_long = now - last_begin_ > kLong;
  last_begin_ = now;
  if (!is_long && !always_) {
    copy_.reset();
    return;
  }
  if (!copy_) {
    int64_t bytes = 0;
    for (const TensorId id : tensors_) bytes += bytes_of(id);
    copy_ = std::make_unique_for_overwrite<char[]>(static_cast<size_t>(bytes));
  }
  move(memories, /*back=*/false);
}

void Checkpoint::restore(const Memories& memories) {
  // The time that the next iteration takes is unknown.
  last_begin_ = {};
  move(memories, /*back=*/true);
}

int64_t Checkpoint::bytes_of(TensorId id) const {
  return graph_.tensor(id).bytes() *
         plan_.persistent().num_instances[static_cast<size_t>(id)];
}

void Checkpoint::move(const Memories& memories, bool back) {
  char* next = copy_.get();
  for (const TensorId id : tensors_) {
    const auto bytes = static_cast<size_t>(graph_.tensor(id).bytes());
    for (const int32_t replica :
         first_users(plan_.instances()[static_cast<size_t>(id)])) {
      const DeviceMemory& memory = *memories[static_cast<size_t>(replica)];
      const OpenTensors open(graph_, memory, std::span(&id, 1));
      if (back) {
        std::memcpy(memory.pointer(id), next, bytes);
      } else {
        std::memcpy(next, memory.pointer(id), bytes);
      }
      next += bytes;
    }
  }
}

}  // namespace popsim::runtime
