// A compiled program: kernels in schedule order over planned memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "graph/graph.h"
#include "memory/arena.h"
#include "ops/op_def.h"
#include "runtime/buffer.h"
#include "runtime/memory.h"
#include "schedule/action.h"

namespace popsim::runtime {

// A tensor that comes back from a run: a model output or an anchor.
struct ReturnSpec {
  Shape shape;  // of all entries together
  DType dtype;
  // Anchors stay in a buffer of the device; outputs are new memory each run.
  bool keep = false;
};

// What an op took over the runs of a profile.
struct OpTime {
  int64_t op;          // position in Graph::ops()
  int64_t executions;  // in one run
  double seconds;      // of all executions in one run: the median over the runs
};

struct RunConfig {
  int64_t device_iterations = 1;
  int64_t gradient_accumulation = 1;
  bool training = false;
  std::string schedule = "sequential";
};

class Executable {
 public:
  // Verifies the graph, prepares every kernel and allocates all memory. The
  // setup ops run in load().
  Executable(graph::Graph graph, const RunConfig& config,
             std::vector<ReturnSpec> returns);

  // Computes what only depends on constants. To be called once, after the
  // constants are written.
  void load();
  // One call: all device iterations and micro-batches. `inputs` are contiguous
  // tensors of whole batches, in the order of the graph's input tensors.
  // Returns one tensor per ReturnSpec, undefined for kept ones.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) {
    return run(inputs, nullptr);
  }

  // Runs `repeats` times and returns a time per op that runs, setup left out.
  // These are runs like any other: weights train, random numbers move on.
  std::vector<OpTime> profile(const std::vector<at::Tensor>& inputs,
                              int64_t repeats);

  void write(graph::TensorId id, const at::Tensor& value);
  [[nodiscard]] at::Tensor read(graph::TensorId id) const;
  // A copy of a kept return buffer as the last run left it.
  [[nodiscard]] at::Tensor read_kept(int64_t index) const;

  void set_seed(uint64_t seed) { seed_ = seed; }
  [[nodiscard]] uint64_t seed() const { return seed_; }
  // Micro-batches begun so far; random numbers are keyed with it.
  void set_step(int64_t step) { step_ = step; }
  [[nodiscard]] int64_t step() const { return step_; }

  [[nodiscard]] const graph::Graph& graph() const { return graph_; }
  [[nodiscard]] const schedule::Schedule& schedule() const { return schedule_; }
  [[nodiscard]] int64_t arena_bytes() const { return plan_.arena_bytes; }
  [[nodiscard]] int64_t peak_live_bytes() const {
    return plan_.peak_live_bytes;
  }
  [[nodiscard]] int64_t persistent_bytes() const {
    return memory_->persistent_bytes();
  }

 private:
  // An op ready to run.
  struct Instruction {
    ops::Kernel* kernel;
    const graph::Op* op;
  };
  struct InputSlice {
    graph::TensorId id;
    int64_t bytes;
  };
  class Context;
  class Stopwatch;

  void prepare_kernels();
  void build_blocks(const std::vector<memory::Block>& blocks);
  [[nodiscard]] const std::vector<Instruction>& block(
      const schedule::Action& action) const;
  [[nodiscard]] ops::LoopCounts loop_counts() const;
  void check_inputs(const std::vector<at::Tensor>& inputs) const;
  void bind_inputs(const std::vector<at::Tensor>& inputs, int64_t micro_batch);
  void run_action(const schedule::Action& action,
                  const std::vector<at::Tensor>& inputs, Context& context,
                  int64_t iteration, int64_t first_step);
  void run_iteration(const std::vector<at::Tensor>& inputs, Context& context,
                     int64_t iteration);
  static void execute(const Instruction& instruction,
                      const ops::RunContext& context);
  static void execute(const std::vector<Instruction>& block,
                      const Context& context);
  // With a stopwatch, every op is timed.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs,
                              Stopwatch* stopwatch);

  graph::Graph graph_;
  RunConfig config_;
  std::vector<ReturnSpec> returns_;
  schedule::Schedule schedule_;
  memory::ArenaPlan plan_;
  std::unique_ptr<DeviceMemory> memory_;
  std::vector<std::unique_ptr<ops::Kernel>> kernels_;  // by op
  std::vector<Instruction> setup_;
  std::vector<std::vector<Instruction>> forward_;   // by stage
  std::vector<std::vector<Instruction>> backward_;  // by stage
  std::vector<Instruction> update_;
  std::vector<InputSlice> inputs_;
  std::vector<at::Tensor> kept_;   // by return; undefined: not kept
  std::vector<Buffer> buffers_;    // by return
  std::vector<ops::Sink*> sinks_;  // the same
  uint64_t seed_ = 0;
  int64_t step_ = 0;
  std::atomic<bool> running_ = false;
};

}  // namespace popsim::runtime
