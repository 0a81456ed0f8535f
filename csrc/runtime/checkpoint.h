// What a device iteration changes before its update, as it was when it began.
//
// Most weights change after all micro-batches. Some variables change earlier:
// weights that the body of a loop reads after their update, buffers that
// forward changes (running statistics), and velocities that gradients are added
// to. A run that is stopped in the middle of a long device iteration gives the
// iteration up and puts these back.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "runtime/memory.h"
#include "runtime/plan.h"

namespace popsim::runtime {

class Checkpoint {
 public:
  explicit Checkpoint(const Plan& plan);

  // The host gave the tensor a value, so it is more than a place for results.
  void add_if_changed(graph::TensorId id);
  // A device iteration begins. Copies are made only where iterations take long
  // and for the first one, whose time is unknown: in the others a run that
  // is to end goes on to the end of the iteration. Where the program calls code
  // of the host, which may fail, or waits for data between micro-batches, or
  // has loops that nobody knows the end of, or updates weights in the middle of
  // an iteration, copies are made always.
  void begin(const DeviceMemory& memory);
  // Whether the iteration can be given up.
  [[nodiscard]] bool complete() const { return tensors_.empty() || copy_; }
  // After it the next iteration is a first one, again.
  void restore(const DeviceMemory& memory);

 private:
  using Clock = std::chrono::steady_clock;

  const graph::Graph& graph_;
  bool always_;
  std::vector<bool> changed_;  // by TensorId
  std::vector<graph::TensorId> tensors_;
  std::unique_ptr<char[]> copy_;
  Clock::time_point last_begin_;
};

}  // namespace popsim::runtime
