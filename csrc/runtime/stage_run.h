// The state of one device while it runs: its memory, its kernels, its position.
//
// One device runs the whole program today. With a thread for each stage there
// is one of these per stage, each with the blocks of its stage.
#pragma once

#include <atomic>
#include <exception>
#include <span>
#include <vector>

#include "runtime/checkpoint.h"
#include "runtime/instructions.h"
#include "runtime/listener.h"
#include "runtime/memory.h"
#include "runtime/plan.h"
#include "runtime/source.h"
#include "runtime/stop.h"

namespace popsim::runtime {

// What one call of the program brings along.
struct Call {
  std::span<Source* const> sources;   // by input of the plan
  std::span<ops::Sink* const> sinks;  // by return
  std::span<Feed* const> feeds;       // what some of the sources hold
  std::span<ops::Outlet* const> outlets;
  uint64_t seed = 0;
  ops::HostCode* host = nullptr;  // what the program may call, if anything
  std::span<Listener* const> listeners;
  StopSign& stop;
};

class StageRun {
 public:
  // Prepares every kernel and allocates all memory. The plan is to outlive it.
  explicit StageRun(const Plan& plan);

  // Runs the setup ops. To be called once, after the constants are written.
  void load(std::span<Listener* const> listeners);
  // Runs all device iterations, or as many as an op that may end the run lets
  // it. Throws Stopped when the sign is up, HostFailure when code of the host
  // fails and FeedEnd when there is no data; all that training keeps between
  // runs is then as whole device iterations left it. So it is after any other
  // UserError where iterations wait for data in the middle.
  void run(const Call& call);

  [[nodiscard]] const DeviceMemory& memory() const { return memory_; }
  // The host has written to the tensor.
  void note_written(graph::TensorId id) { checkpoint_.add_if_changed(id); }
  // Micro-batches begun since the program was loaded.
  [[nodiscard]] int64_t step() const { return step_; }
  // The same, of runs alone; from any thread.
  [[nodiscard]] int64_t num_begun() const {
    return num_begun_.load(std::memory_order_relaxed);
  }
  // The micro-batch that the last run has worked on last, counted from its
  // start, or that it had no data for; from any thread.
  [[nodiscard]] int64_t last_micro_batch() const {
    return last_micro_batch_.load(std::memory_order_relaxed);
  }
  void set_step(int64_t step) { step_ = step; }
  // Device iterations that runs have finished since the program was loaded.
  [[nodiscard]] int64_t num_iterations() const { return num_iterations_; }

 private:
  // What an action runs, and what it has to find in its place.
  struct Block {
    std::vector<Instruction> instructions;
    std::vector<size_t> inputs;   // that it reads: positions in the plan's
    std::vector<size_t> stashes;  // of the memory's
  };

  void build_blocks();
  [[nodiscard]] Block make_block(const memory::Block& planned) const;
  [[nodiscard]] const Block& block(const schedule::Action& action) const;
  void run_iterations(const Call& call);
  void run_iteration(const Call& call, int64_t iteration);
  // Whether the run ends here, in inference, where an iteration is a
  // micro-batch.
  [[nodiscard]] bool ended(int64_t first_step) const {
    return ended_ && !plan_.training() && num_finished_ == step_ - first_step;
  }
  // The sign is up in front of an action, or there is no more data. Returns
  // whether to leave it out; throws as soon as the run can end.
  [[nodiscard]] bool end_before(const schedule::Action& action,
                                int64_t iteration, int64_t first_step);
  // Puts back what a device iteration of a training program has changed, if
  // that is known, and returns whether it is.
  bool give_up(int64_t first_step);
  void run_action(const Call& call, const schedule::Action& action,
                  int64_t iteration, int64_t first_step);
  // Takes the element of a micro-batch that begins from each feed, whichever
  // stage reads it. Returns false where there is no data and `num_begun`
  // micro-batches, some of which are in flight, are to be finished first.
  [[nodiscard]] bool take_elements(const Call& call, int64_t micro_batch,
                                   int64_t num_begun);
  // Runs a block for a micro-batch, counted from the start of the device
  // iteration and from that of the run.
  void execute(const Call& call, const Block& block, int64_t micro_batch,
               int64_t index);
  // Gives elements back whose micro-batch is finished after an action.
  void release_inputs(const Call& call, const schedule::Action& action,
                      int64_t micro_batch);

  const Plan& plan_;
  DeviceMemory memory_;
  Instructions instructions_;
  std::vector<Instruction> setup_;
  std::vector<Block> forward_;   // by stage
  std::vector<Block> backward_;  // by stage
  Block update_;
  Context context_;
  Checkpoint checkpoint_;
  int64_t step_ = 0;
  int64_t num_iterations_ = 0;
  int64_t num_finished_ = 0;  // micro-batches of this device iteration
  std::atomic<int64_t> num_begun_ = 0;
  std::atomic<int64_t> last_micro_batch_ = 0;
  bool ended_ = false;           // by an op
  std::exception_ptr feed_end_;  // of a run that finishes what is in flight
};

}  // namespace popsim::runtime
