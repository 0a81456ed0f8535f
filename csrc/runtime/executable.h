// A compiled program that can be called.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "graph/graph.h"
#include "ops/host/anchor.h"
#include "runtime/buffer.h"
#include "runtime/number_watch.h"
#include "runtime/plan.h"
#include "runtime/source.h"
#include "runtime/stage_run.h"
#include "runtime/stop.h"
#include "runtime/stopwatch.h"
#include "runtime/usage.h"

namespace popsim::runtime {

// Who has to do with a run besides the program.
struct Company {
  Overseer* overseer = nullptr;   // may be null
  ops::HostCode* host = nullptr;  // null where the program calls none
};

// Where the values of an input come from.
struct InputPlace {
  // The feed, or -1: a tensor that the call brings.
  int64_t feed = -1;
  // In the feed's elements.
  int64_t position = 0;
  // The call gives one value, and all micro-batches read it.
  bool shared = false;
};

// Can be used by one thread at a time: a run or copy that finds another one
// going on throws UserError.
class Executable {
 public:
  // Prepares every kernel and allocates all memory. The setup ops run in
  // load().
  explicit Executable(Plan plan);

  // Computes what only depends on constants. To be called once, after the
  // constants are written.
  void load();
  // Connects the program with queues: those that it enqueues to, and those that
  // inputs come from, as `places` say by input. To be called before the first
  // run; without it the call brings all inputs, and nothing can be enqueued.
  void connect(std::vector<std::shared_ptr<ops::Outlet>> outlets,
               std::vector<std::shared_ptr<Inlet>> inlets,
               const std::vector<InputPlace>& places);
  // One call: all device iterations and micro-batches. `inputs` are contiguous
  // tensors of whole batches, in the order of the plan's inputs; those that
  // come from feeds are left out. Gives one tensor per return, undefined for
  // kept ones. Throws Stopped when the overseer or stop() ends it, and
  // HostFailure when the host's code does.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs,
                              const Company& company);
  // Runs `repeats` times and returns a time per op that runs, setup left out.
  // These are runs like any other: weights train, random numbers move on.
  std::vector<OpTime> profile(const std::vector<at::Tensor>& inputs,
                              int64_t repeats, const Company& company);
  // Ends the run that is going on; from any thread. Returns whether there is
  // one.
  bool stop() { return usage_.stop(); }
  // Micro-batches begun so far, also while a run goes on; from any thread.
  [[nodiscard]] int64_t num_micro_batches() const { return stage_.num_begun(); }
  // The micro-batch that the last run has worked on last, counted from its
  // start, or that it had no data for; from any thread.
  [[nodiscard]] int64_t last_micro_batch() const {
    return stage_.last_micro_batch();
  }
  // Device iterations finished so far; none of them is one that failed or was
  // stopped.
  [[nodiscard]] int64_t num_iterations() const;
  // Runs begun so far.
  [[nodiscard]] int64_t num_runs() const { return num_runs_; }
  // When the last complete run was called, began and ended, in seconds of the
  // steady clock.
  [[nodiscard]] std::tuple<double, double, double> last_run() const;

  // Each copies all its tensors or none. What has a factor is multiplied by it.
  void write(const std::map<graph::TensorId, at::Tensor>& values,
             const std::map<graph::TensorId, double>& factors);
  [[nodiscard]] std::vector<at::Tensor> read(
      const std::vector<graph::TensorId>& ids) const;
  void read_into(const std::map<graph::TensorId, at::Tensor>& targets) const;
  // A copy of what a kept return has of a tensor, as the last run left it: of
  // its source, or of a view that rearranges all of that.
  [[nodiscard]] at::Tensor read_kept(int64_t index, graph::TensorId id) const;

  void set_seed(uint64_t seed);
  [[nodiscard]] uint64_t seed() const;
  // Micro-batches begun so far; random numbers are keyed with it.
  void set_step(int64_t step);
  [[nodiscard]] int64_t step() const;

  [[nodiscard]] const Plan& plan() const { return plan_; }

 private:
  void place_inputs(std::vector<std::shared_ptr<Inlet>> inlets,
                    const std::vector<InputPlace>& places);
  void check_inputs(const std::vector<at::Tensor>& inputs) const;
  // Points the sinks at where the returns go: kept buffers and new tensors.
  std::vector<at::Tensor> make_results();
  [[nodiscard]] at::Tensor memory_of(graph::TensorId id) const;
  void check_size(const char* what, graph::TensorId id,
                  const at::Tensor& other) const;
  // The stopwatch may be null.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs,
                              const Company& company, Listener* stopwatch);
  // Who is told of a run: the watch, if the plan asks for it, and the other,
  // which may be null.
  [[nodiscard]] std::vector<Listener*> listeners(Listener* other);

  Plan plan_;
  StageRun stage_;
  std::vector<ops::Return> returns_;
  std::vector<at::Tensor> kept_;    // by return; undefined: not kept
  std::vector<InputPlace> places_;  // by input
  std::vector<std::unique_ptr<Source>> sources_;  // the same
  std::vector<Source*> all_sources_;              // the same
  std::vector<CallSlice*> slices_;                // by tensor of a call
  std::vector<std::unique_ptr<Feed>> feeds_;
  std::vector<Feed*> all_feeds_;
  std::vector<std::shared_ptr<ops::Outlet>> outlets_;
  std::vector<ops::Outlet*> all_outlets_;
  std::vector<Buffer> buffers_;    // by return
  std::vector<ops::Sink*> sinks_;  // the same
  std::optional<NumberWatch> watch_;
  uint64_t seed_ = 0;
  std::atomic<int64_t> num_runs_ = 0;
  std::chrono::steady_clock::time_point called_;
  std::chrono::steady_clock::time_point began_;
  std::chrono::steady_clock::time_point ended_;
  mutable Usage usage_;
  StopSign stop_{usage_};
};

}  // namespace popsim::runtime
