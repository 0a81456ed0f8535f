// A body of an op while it runs: its memory and its kernels.
#pragma once

#include <vector>

#include "ops/body.h"
#include "runtime/instructions.h"
#include "runtime/memory.h"

namespace popsim::runtime {

class BodyRun final : public ops::BodyRunner {
 public:
  // `arena` is the memory of the op that the body belongs to.
  BodyRun(const graph::Graph& body, const memory::ArenaPlan& plan, char* arena);

  void bind_input(size_t i, void* address) override {
    memory_.bind(inputs_[i], address);
  }
  void bind_result(size_t i, void* address) override {
    memory_.bind(results_[i], address);
  }
  // Throws Stopped if the run was asked to end and may end here.
  void run(const ops::RunContext& outer, int64_t step) override;

 private:
  void choose_listeners(const Context& outer);

  const graph::Graph& graph_;
  std::vector<graph::TensorId> inputs_;
  std::vector<graph::TensorId> results_;
  DeviceMemory memory_;
  Instructions instructions_;
  std::vector<Instruction> all_;
  Context context_;
  std::vector<Listener*> listeners_;
};

}  // namespace popsim::runtime
