// A compiled program that can be called.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <vector>

#include "graph/graph.h"
#include "runtime/buffer.h"
#include "runtime/plan.h"
#include "runtime/source.h"
#include "runtime/stage_run.h"
#include "runtime/stopwatch.h"

namespace popsim::runtime {

// A tensor that comes back from a run: a model output or an anchor.
struct ReturnSpec {
  Shape shape;  // of all entries together
  DType dtype;
  // Anchors stay in a buffer of the device; outputs are new memory each run.
  bool keep = false;
};

class Executable {
 public:
  // Prepares every kernel and allocates all memory. The setup ops run in
  // load().
  Executable(Plan plan, std::vector<ReturnSpec> returns);

  // Computes what only depends on constants. To be called once, after the
  // constants are written.
  void load() { stage_.load(); }
  // One call: all device iterations and micro-batches. `inputs` are contiguous
  // tensors of whole batches, in the order of the plan's inputs. Returns one
  // tensor per ReturnSpec, undefined for kept ones.
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
  void set_step(int64_t step) { stage_.set_step(step); }
  [[nodiscard]] int64_t step() const { return stage_.step(); }

  [[nodiscard]] const Plan& plan() const { return plan_; }

 private:
  void check_inputs(const std::vector<at::Tensor>& inputs) const;
  // Points the sinks at where the returns go: kept buffers and new tensors.
  std::vector<at::Tensor> make_results();
  [[nodiscard]] at::Tensor memory_of(graph::TensorId id) const;
  // The listener may be null.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs,
                              Listener* listener);

  Plan plan_;
  StageRun stage_;
  std::vector<ReturnSpec> returns_;
  std::vector<at::Tensor> kept_;   // by return; undefined: not kept
  std::vector<CallSlice> slices_;  // by input
  std::vector<Source*> sources_;   // the same
  std::vector<Buffer> buffers_;    // by return
  std::vector<ops::Sink*> sinks_;  // the same
  uint64_t seed_ = 0;
  std::atomic<bool> running_ = false;
};

}  // namespace popsim::runtime
