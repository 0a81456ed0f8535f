// The state of a program while it runs: its memory, its lanes, its position.
//
// One thread runs all actions in the order of the schedule, whichever lanes
// they belong to, and each action for all replicas. Where the program has
// several lanes or teams of replicas, and the caller may use as many threads,
// they run at the same time instead (lane_team.h).
#pragma once

#include <atomic>
#include <exception>
#include <memory>
#include <span>

#include "ops/number_checks.h"
#include "runtime/checkpoint.h"
#include "runtime/lane.h"
#include "runtime/listener.h"
#include "runtime/memory.h"
#include "runtime/pace.h"
#include "runtime/plan.h"
#include "runtime/source.h"
#include "runtime/stop.h"
#include "runtime/version.h"

namespace popsim::runtime {

class ProgramRun {
 public:
  // Prepares every kernel and allocates all memory. `observed` is null, or the
  // plan of an observed version beside the plain one. The plans must outlive
  // it.
  ProgramRun(const Plan& plan, const Plan* observed);

  // Runs the setup ops. Call it once, after the constants are written.
  void load(std::span<Listener* const> listeners);
  // Runs all device iterations, or fewer if an op ends the run. Throws Stopped
  // if a stop is requested, HostFailure if code of the host fails, BadNumber if
  // a check of the program fails, and FeedEnd if there is no data. After these,
  // everything that training keeps between runs is as whole device iterations
  // left it. The same is true after any other UserError if iterations wait for
  // data in the middle or update weights in the middle.
  void run(const Call& call);

  // The memory of a replica. The tensors that are kept between runs are at one
  // address for all its lanes.
  [[nodiscard]] const DeviceMemory& memory(int32_t replica) const {
    return *plain_.memories[static_cast<size_t>(replica)];
  }
  // That of the observed version, which must exist.
  [[nodiscard]] const DeviceMemory& observed_memory() const {
    return *observed_->memories[0];
  }
  // Says which device iterations the observed version runs. In inference, all
  // those of a call count as one.
  void set_pace(const Pace& pace) { pace_ = pace; }
  [[nodiscard]] const Pace& pace() const { return pace_; }
  // Notes that the host has written to the tensor.
  void note_written(graph::TensorId id) { checkpoint_.add_if_changed(id); }
  // Number of micro-batches begun, by all replicas in all processes; the random
  // numbers of the next ones follow from it.
  [[nodiscard]] int64_t step() const {
    return first_key_ + step_ * plan_.num_copies();
  }
  // Number of micro-batches begun by runs of this process; any thread may call
  // it.
  [[nodiscard]] int64_t num_begun() const {
    return num_begun_.load(std::memory_order_relaxed);
  }
  // The micro-batch, counted from the start of the run, that the last run
  // worked on last or had no data for; any thread may call it.
  [[nodiscard]] int64_t last_micro_batch() const {
    return last_micro_batch_.load(std::memory_order_relaxed);
  }
  // The device iteration of the last run that ended with BadNumber. That run
  // has discarded it, in inference with all others of the run.
  [[nodiscard]] int64_t bad_iteration() const { return bad_iteration_; }
  // Counts a device iteration of training as done, without running it.
  void skip_iteration();
  void set_step(int64_t step) {
    first_key_ = step - step_ * plan_.num_copies();
  }
  // Number of device iterations that runs have finished since the program was
  // loaded.
  [[nodiscard]] int64_t num_iterations() const { return num_iterations_; }

 private:
  void run_iterations(const Call& call);
  // Runs an iteration in the version whose turn it is.
  void run_in_turn(const Call& call, int64_t iteration);
  void run_iteration(const Call& call, int64_t iteration);
  // Runs the actions of an iteration, but the update, on a thread for each
  // lane.
  void run_lanes(const Call& call, int64_t iteration, int64_t first_step);
  // Runs the update once for all replicas.
  void update(const Call& call, const schedule::Action& action,
              int64_t iteration);
  // The key of the random numbers of a micro-batch, counted since the program
  // was loaded, on the first replica: one replica with the micro-batches of
  // all, in all processes, would give it the same one.
  [[nodiscard]] int64_t key(int64_t step) const {
    return first_key_ + step * plan_.num_copies() + plan_.first_copy();
  }
  // Whether the run ends here. Only in inference, where an iteration is a
  // micro-batch.
  [[nodiscard]] bool ended(int64_t first_step) const {
    return ended_ && !plan_.training() && num_finished_ == step_ - first_step;
  }
  // Call it before an action if a stop is requested or there is no more data.
  // Returns whether to skip the action; throws as soon as the run can end.
  [[nodiscard]] bool end_before(const schedule::Action& action,
                                int64_t iteration, int64_t first_step);
  // Puts back the variables that a device iteration of a training program has
  // changed, if it has copies of them. Returns whether it has.
  bool give_up(int64_t first_step);
  void run_action(const Call& call, const schedule::Action& action,
                  int64_t iteration, int64_t first_step);
  // Takes the element of a new micro-batch from each feed, whichever stage
  // reads it. Returns false if there is no data and some of the `num_begun`
  // micro-batches are still in flight and must be finished first.
  [[nodiscard]] bool take_elements(const Call& call, int64_t micro_batch,
                                   int64_t num_begun);
  // Releases the elements of a micro-batch if an action has finished it.
  void release_inputs(const Call& call, const schedule::Action& action,
                      int64_t micro_batch);

  const Plan& plan_;
  Version plain_;
  std::unique_ptr<Version> observed_;  // null: there is none
  Version* at_hand_;                   // the one that runs
  Pace pace_;
  int64_t num_turns_ = 0;  // runs of inference, for the pace
  Checkpoint checkpoint_;
  int64_t step_ = 0;  // micro-batches begun since the program was loaded
  int64_t first_key_ = 0;
  int64_t num_iterations_ = 0;
  int64_t num_finished_ = 0;  // micro-batches finished in this device iteration
  std::atomic<int64_t> num_begun_ = 0;
  std::atomic<int64_t> last_micro_batch_ = 0;
  bool ended_ = false;  // an op has ended the run
  ops::NumberChecks checks_;
  int64_t bad_iteration_ = 0;
  // The error of a run that still finishes micro-batches in flight.
  std::exception_ptr feed_end_;
};

}  // namespace popsim::runtime
