#include "runtime/instructions.h"

#include <c10/util/Exception.h>

#include "base/check.h"
#include "ops/host_code.h"
#include "ops/number_checks.h"
#include "runtime/body_run.h"
#include "runtime/closed_memory.h"

namespace popsim::runtime {
namespace {

using graph::Op;
using graph::TensorId;

template <typename Error>
Error failure(const char* what, const Op& op, const char* reason) {
  return Error(join("while ", what, " ", op, ": ", reason));
}

// If PyTorch refuses an operator while its kernel is prepared, lowering has
// made a mistake.
std::unique_ptr<ops::Kernel> prepare(const ops::OpView& view) {
  const Op& op = view.op();
  constexpr const char* kWhat = "preparing";
  try {
    return ops::find_op(op.kind).prepare(view);
  } catch (const ops::OpError&) {
    throw;
  } catch (const UserError& error) {
    throw failure<UserError>(kWhat, op, error.what());
  } catch (const c10::Error& error) {
    throw failure<InternalError>(kWhat, op, error.what_without_backtrace());
  } catch (const InternalError& error) {
    throw failure<InternalError>(kWhat, op, error.what());
  }
}

}  // namespace

Instructions::Instructions(const graph::Graph& graph,
                           const memory::ArenaPlan& plan, DeviceMemory& memory)
    : Instructions(graph, plan, memory,
                   std::vector<bool>(graph.ops().size(), true)) {}

Instructions::Instructions(const graph::Graph& graph,
                           const memory::ArenaPlan& plan, DeviceMemory& memory,
                           const std::vector<bool>& wanted)
    : graph_(graph), memory_(memory) {
  kernels_.reserve(graph.ops().size());
  for (size_t i = 0; i < graph.ops().size(); ++i) {
    const Op& op = graph.ops()[i];
    if (!wanted[i]) {
      kernels_.push_back(nullptr);
      continue;
    }
    std::vector<ops::BodyRunner*> bodies;
    for (size_t k = 0; k < op.bodies.size(); ++k) {
      const memory::BodyPlacement& place =
          plan.bodies.at(static_cast<int64_t>(i));
      bodies_.push_back(std::make_unique<BodyRun>(*op.bodies[k], place.plans[k],
                                                  memory.start_of(place)));
      bodies.push_back(bodies_.back().get());
    }
    kernels_.push_back(prepare(ops::OpView(graph, op, bodies)));
    for (const TensorId id : kernels_.back()->at_tensors()) {
      memory.make_tensor(id);
    }
  }
}

Instructions::~Instructions() = default;

void Instructions::execute(const Instruction& instruction,
                           const Context& context) const {
  const Op& op = *instruction.op;
  const OpenTensors open(graph_, memory_, op);
  constexpr const char* kWhat = "running";
  try {
    instruction.kernel->run(context);
  } catch (const ops::HostFailure&) {
    throw;
  } catch (const ops::BadNumber&) {
    throw;
  } catch (const InternalError& error) {
    // The message names the op of the body that failed already.
    if (!op.bodies.empty()) throw;
    throw failure<InternalError>(kWhat, op, error.what());
  } catch (const UserError& error) {
    if (!op.bodies.empty()) throw;
    throw failure<UserError>(kWhat, op, error.what());
  } catch (const c10::Error& error) {
    throw failure<UserError>(kWhat, op, error.what_without_backtrace());
  } catch (const std::exception& error) {
    throw failure<UserError>(kWhat, op, error.what());
  }
}

void Instructions::execute_watched(const Instruction& instruction,
                                   const Context& context) const {
  const Op& op = *instruction.op;
  {
    const OpenTensors open(graph_, memory_, op);
    for (Listener* listener : context.listeners) listener->before(op, context);
  }
  execute(instruction, context);
  const OpenTensors open(graph_, memory_, op);
  for (Listener* listener : context.listeners) listener->after(op, context);
}

void Instructions::execute(std::span<const Instruction> instructions,
                           const Context& context) const {
  if (context.listeners.empty()) {
    for (const Instruction& instruction : instructions) {
      execute(instruction, context);
    }
    return;
  }
  for (Listener* listener : context.listeners) listener->before_action();
  for (const Instruction& instruction : instructions) {
    execute_watched(instruction, context);
  }
}

}  // namespace popsim::runtime
