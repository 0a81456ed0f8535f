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
#include "runtime/number_log.h"
#include "runtime/number_watch.h"
#include "runtime/once_outlet.h"
#include "runtime/plan.h"
#include "runtime/program_run.h"
#include "runtime/shared_outlet.h"
#include "runtime/source.h"
#include "runtime/stop.h"
#include "runtime/stopwatch.h"
#include "runtime/timeline.h"
#include "runtime/usage.h"

namespace popsim::runtime {

// Objects outside the program that take part in a run.
struct Company {
  Overseer* overseer = nullptr;  // may be null
  // Null if the program calls no code of the host.
  ops::HostCode* host = nullptr;
  // Null if this process trains alone.
  ops::Exchange* exchange = nullptr;
};

// Where the values of an input come from.
struct InputPlace {
  // The number of the feed, or -1 if the caller passes the tensor.
  int64_t feed = -1;
  // The position among the tensors of the feed's elements.
  int64_t position = 0;
  // The caller passes one value, and all micro-batches read it.
  bool shared = false;
};

// One thread at a time can use it: a run or a copy throws UserError while
// another one is in progress.
class Executable {
 public:
  // Prepares every kernel and allocates all memory. The setup ops run in
  // load(). An observed version of the program, with the same tensors and
  // others after them, may lie beside it; its plan must have been made beside
  // that of the program.
  explicit Executable(std::unique_ptr<const Plan> plan,
                      std::unique_ptr<const Plan> observed = nullptr);

  // Computes the tensors that depend only on constants. Call it once, after the
  // constants are written.
  void load();
  // Connects the program with its queues: `outlets` are those it enqueues to,
  // `inlets` those its inputs come from, and `places` says for each input where
  // its values are. Call it before the first run. Without this call, the caller
  // passes all inputs, and the program cannot enqueue.
  void connect(std::vector<std::shared_ptr<ops::Outlet>> outlets,
               std::vector<std::shared_ptr<Inlet>> inlets,
               const std::vector<InputPlace>& places);
  // Runs the program once: all device iterations and micro-batches. `inputs`
  // are contiguous tensors of whole batches, in the order of the plan's inputs,
  // without those that come from feeds. Returns one tensor per return; the
  // tensor is undefined if the return is kept on the device. Throws Stopped if
  // the overseer or stop() ends the run, and HostFailure if code of the host
  // fails.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs,
                              const Company& company);
  // Continues the last run, which ended with BadNumber: the bad device
  // iteration is left out, or runs without checks. In inference, all of the run
  // is repeated without checks. Queues get no element of the iteration twice.
  std::vector<at::Tensor> resume(const std::vector<at::Tensor>& inputs,
                                 const Company& company, bool skip);
  // What the bad device iteration of the last run reads, by input of the plan:
  // copies of the values of all its micro-batches, in one flat tensor, or of
  // the one value that all share. `inputs` are those of the run. In inference,
  // they are those of the whole run.
  [[nodiscard]] std::vector<at::Tensor> bad_inputs(
      const std::vector<at::Tensor>& inputs) const;
  // Says that nobody will continue the last run: the elements that it still
  // holds after BadNumber go back to their feeds.
  void let_go();
  // The device iteration that ended the last run of this kind, counted from the
  // start of the run.
  [[nodiscard]] int64_t bad_iteration() const;
  // Runs the program once, without checks, and notes bad numbers
  // (number_log.h). An error that ends the run is a part of the result.
  [[nodiscard]] NumberRecord log_numbers(const std::vector<at::Tensor>& inputs,
                                         const Company& company,
                                         int64_t copied);
  // Runs `repeats` times and returns a time for each op that runs, without
  // setup ops. These are ordinary runs: weights are trained, and random numbers
  // advance.
  std::vector<OpTime> profile(const std::vector<at::Tensor>& inputs,
                              int64_t repeats, const Company& company);
  // Whether the runs from now on are recorded: when each of their actions
  // begins and ends. Forgets what is recorded.
  void record(bool on);
  // The last recorded run, or null: none is complete.
  [[nodiscard]] std::optional<Timeline> timeline() const;
  // Stops the current run; any thread may call it. Returns whether there is a
  // run.
  bool stop() { return usage_.stop(); }
  // Number of micro-batches begun so far, also during a run; any thread may
  // call it.
  [[nodiscard]] int64_t num_micro_batches() const { return stage_.num_begun(); }
  // The micro-batch, counted from the start of the run, that the last run
  // worked on last or had no data for; any thread may call it.
  [[nodiscard]] int64_t last_micro_batch() const {
    return stage_.last_micro_batch();
  }
  // Number of device iterations finished so far, without those that failed or
  // were stopped.
  [[nodiscard]] int64_t num_iterations() const;
  // Number of runs begun so far.
  [[nodiscard]] int64_t num_runs() const { return num_runs_; }
  // Whether a run is in progress; any thread may call it.
  [[nodiscard]] bool running() const { return usage_.running(); }
  // When the last complete run was called, began and ended, in seconds of the
  // steady clock.
  [[nodiscard]] std::tuple<double, double, double> last_run() const;

  // Each of these copies all its tensors or none. A tensor with a factor is
  // multiplied by it.
  void write(const std::map<graph::TensorId, at::Tensor>& values,
             const std::map<graph::TensorId, double>& factors);
  [[nodiscard]] std::vector<at::Tensor> read(
      const std::vector<graph::TensorId>& ids) const;
  void read_into(const std::map<graph::TensorId, at::Tensor>& targets) const;
  // A copy of a tensor that a kept return holds since the last run: of the
  // return's source, or of a view with all values of the source in another
  // order.
  [[nodiscard]] at::Tensor read_kept(int64_t index, graph::TensorId id) const;
  // Writes a constant that only the observed version has.
  void write_observed(graph::TensorId id, const at::Tensor& value);

  // Says in which device iterations the observed version runs.
  void set_pace(const Pace& pace);
  // The distance of observed iterations; 0 if it is not known yet.
  [[nodiscard]] int64_t observed_every() const;

  void set_seed(uint64_t seed);
  [[nodiscard]] uint64_t seed() const;
  // Number of micro-batches begun so far, in all processes; it is part of the
  // key of random numbers.
  void set_step(int64_t step);
  [[nodiscard]] int64_t step() const;

  [[nodiscard]] const Plan& plan() const { return plan_; }
  // Null if there is no observed version.
  [[nodiscard]] const Plan* observed_plan() const { return observed_.get(); }

 private:
  void place_inputs(std::vector<std::shared_ptr<Inlet>> inlets,
                    const std::vector<InputPlace>& places);
  void check_inputs(const std::vector<at::Tensor>& inputs) const;
  // Points the sinks to the memory of the returns: kept buffers and new
  // tensors.
  std::vector<at::Tensor> make_results();
  // Ends what resume() could continue.
  void forget_bad_run();
  // Throws UserError unless the last run ended with BadNumber.
  void check_bad_run(const char* what) const;
  // Runs, and keeps the results if a check of numbers fails.
  template <typename Run>
  std::vector<at::Tensor> fill(std::vector<at::Tensor> results, Run&& run);
  // Passes over the bad device iteration of the last run.
  void leave_out();
  // The values of an input in bad_inputs(): of one that the caller passed, and
  // of one that comes from a feed.
  [[nodiscard]] at::Tensor bad_part(size_t input,
                                    const at::Tensor& given) const;
  [[nodiscard]] at::Tensor bad_elements(size_t input) const;
  [[nodiscard]] at::Tensor memory_of(graph::TensorId id, int32_t replica) const;
  // The group of each replica, if the host sees a value of the variable for
  // each group, along a first axis. Empty for others, of which it sees one
  // value: that of the first replica.
  [[nodiscard]] Groups groups_of(graph::TensorId id) const;
  // The value that the host sees.
  [[nodiscard]] at::Tensor copy_of(graph::TensorId id) const;
  void check_size(const char* what, graph::TensorId id,
                  const at::Tensor& other) const;
  // The listener may be null.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs,
                              const Company& company, Listener* listener,
                              int64_t unchecked_iteration = -1);
  // Runs the device iterations from the first one on, and fills the results.
  void run_from(int64_t first_iteration, int64_t unchecked_iteration,
                const std::vector<at::Tensor>& inputs, const Company& company,
                Listener* listener);
  // The listeners of a run: the number watch, if the plan asks for it, and
  // `other`, which may be null.
  [[nodiscard]] std::vector<Listener*> listeners(Listener* other);

  std::unique_ptr<const Plan> own_plan_;
  std::unique_ptr<const Plan> observed_;
  const Plan& plan_;
  ProgramRun stage_;
  std::vector<ops::Return> returns_;
  std::vector<at::Tensor> kept_;    // by return; undefined: not kept
  std::vector<InputPlace> places_;  // by input
  std::vector<std::unique_ptr<Source>> sources_;  // by input
  std::vector<Source*> all_sources_;              // by input
  std::vector<CallSlice*> slices_;  // by tensor that the caller passes
  std::vector<std::unique_ptr<Feed>> feeds_;
  std::vector<Feed*> all_feeds_;
  std::vector<std::shared_ptr<ops::Outlet>> outlets_;
  std::vector<std::shared_ptr<OnceOutlet>> once_outlets_;
  std::vector<std::unique_ptr<SharedOutlet>> shared_outlets_;
  std::vector<ops::Outlet*> all_outlets_;  // by replica, then by queue
  std::vector<Buffer> buffers_;            // by return
  std::vector<ops::Sink*> sinks_;          // by return
  // The results of a run that ended with BadNumber, which may be continued.
  std::optional<std::vector<at::Tensor>> begun_;
  std::optional<NumberWatch> watch_;
  std::optional<Timeline> timeline_;  // if runs are recorded
  uint64_t seed_ = 0;
  std::atomic<int64_t> num_runs_ = 0;
  std::chrono::steady_clock::time_point called_;
  std::chrono::steady_clock::time_point began_;
  std::chrono::steady_clock::time_point ended_;
  mutable Usage usage_;
  StopSign stop_{usage_};
};

}  // namespace popsim::runtime
