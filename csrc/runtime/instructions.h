// The ops of a graph, ready to run: those of a program, or those of a body.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "memory/arena.h"
#include "ops/op_def.h"
#include "runtime/listener.h"
#include "runtime/memory.h"
#include "runtime/stop.h"

namespace popsim::runtime {

// The context that kernels see, together with data of the runtime.
class Context final : public ops::RunContext {
 public:
  explicit Context(const DeviceMemory& memory) : memory_(memory) {
    pointers = memory.pointers();
  }
  const at::Tensor& tensor(graph::TensorId id) const override {
    return memory_.tensor(id);
  }

  std::span<Listener* const> listeners;
  // Ops that run for long check it; null if the run cannot stop here.
  StopSign* stop = nullptr;

 private:
  const DeviceMemory& memory_;
};

struct Instruction {
  ops::Kernel* kernel;
  const graph::Op* op;
};

class Instructions {
 public:
  // Prepares every kernel and every body. The arguments must outlive this
  // object.
  Instructions(const graph::Graph& graph, const memory::ArenaPlan& plan,
               DeviceMemory& memory);
  // The same, for some of the ops alone: `wanted` is by their position.
  Instructions(const graph::Graph& graph, const memory::ArenaPlan& plan,
               DeviceMemory& memory, const std::vector<bool>& wanted);
  ~Instructions();

  [[nodiscard]] Instruction operator[](size_t op) const {
    return {kernels_[op].get(), &graph_.ops()[op]};
  }
  // Runs some instructions, and calls the listeners of the context.
  void execute(std::span<const Instruction> instructions,
               const Context& context) const;

 private:
  void execute(const Instruction& instruction, const Context& context) const;
  void execute_watched(const Instruction& instruction,
                       const Context& context) const;

  const graph::Graph& graph_;
  const DeviceMemory& memory_;
  std::vector<std::unique_ptr<ops::BodyRunner>> bodies_;
  std::vector<std::unique_ptr<ops::Kernel>>
      kernels_;  // by op; null: not wanted
};

}  // namespace popsim::runtime
