// The stages of a replica that one thread works on: their kernels, and their
// view of the device's memory.
//
// A program that one thread runs has one lane with all stages for each replica.
// The lanes of a replica share the memory itself. Each knows where inputs and
// stashed tensors are for the micro-batch that it works on.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "runtime/checkpoint.h"
#include "runtime/instructions.h"
#include "runtime/listener.h"
#include "runtime/memory.h"
#include "runtime/once_outlet.h"
#include "runtime/plan.h"
#include "runtime/source.h"
#include "runtime/stop.h"
#include "runtime/timeline.h"

namespace popsim::runtime {

// The data and objects of one call of the program.
struct Call {
  std::span<Source* const> sources;   // by input of the plan
  std::span<ops::Sink* const> sinks;  // by return
  std::span<Feed* const> feeds;       // the feeds that some of the sources read
  // Those of the first replica, then those of the next.
  std::span<ops::Outlet* const> outlets;
  uint64_t seed = 0;
  // Null if the program calls no code of the host.
  ops::HostCode* host = nullptr;
  // Null if this process trains alone.
  ops::Exchange* exchange = nullptr;
  std::span<Listener* const> listeners;
  StopSign& stop;
  // The device iteration that the run begins with, and one whose numbers are
  // not checked, or -1.
  int64_t first_iteration = 0;
  int64_t unchecked_iteration = -1;
  // Null: nobody asks when actions begin and end.
  Timeline* timeline = nullptr;
  // The queues behind the outlets, if device iterations may be repeated.
  std::span<const std::shared_ptr<OnceOutlet>> once = {};
};

class Lane;
// By replica, then by the lane's number.
using Lanes = std::vector<std::vector<std::unique_ptr<Lane>>>;

class Lane {
 public:
  // Prepares the kernels of the lane's stages. Lane 0 also has the setup ops
  // and what the replica does in the update. The plan and the memory must
  // outlive it.
  Lane(const Plan& plan, const DeviceStorage& storage, int32_t replica,
       int32_t number);

  // Reads the results of ops of the update that another replica runs where that
  // replica has them. Call it for replicas in their order.
  void share_update(const Lanes& lanes);
  // Lets ops read the memory of all replicas.
  void see(std::span<void* const* const> of_replicas) {
    context_.of_replicas = of_replicas;
  }

  // Runs the setup ops.
  void load(std::span<Listener* const> listeners);
  // Takes what a call gives to all of its ops.
  void begin_run(const Call& call, int64_t iterations_before, bool* ended,
                 ops::NumberChecks* checks);
  // Lets ops that run for long end with the stop sign; null: they go on.
  void let_stop(StopSign* stop) { context_.stop = stop; }
  // Lets ops that wait ask whether to go on.
  void let_wait(ops::Patience* patience) { context_.patience = patience; }
  // Runs an action. `index` is its micro-batch, counted from the start of the
  // run; for the update, the last one.
  void run(const Call& call, const schedule::Action& action,
           const ops::Cursor& cursor, int64_t index);
  // Runs an action in two parts: what comes before its ops, and an op of the
  // update.
  void begin(const Call& call, const schedule::Action& action,
             const ops::Cursor& cursor, int64_t index);
  void run_update(size_t op);

  [[nodiscard]] const DeviceMemory& memory() const { return memory_; }

 private:
  // The instructions of an action, and the tensors that must be at the right
  // address first.
  struct Block {
    std::vector<Instruction> instructions;
    std::vector<size_t> inputs;   // inputs that it reads: positions in the plan
    std::vector<size_t> stashes;  // positions in the memory's stashes
  };

  [[nodiscard]] Block make_block(const memory::Block& planned) const;
  [[nodiscard]] const Block& block(const schedule::Action& action) const;

  const Plan& plan_;
  int32_t replica_;
  DeviceMemory memory_;
  Instructions instructions_;
  std::vector<Instruction> setup_;
  std::vector<Block> forward_;   // by stage; empty for stages of other lanes
  std::vector<Block> backward_;  // the same
  Block update_;
  Context context_;
};

}  // namespace popsim::runtime
