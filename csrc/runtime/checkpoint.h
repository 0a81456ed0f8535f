// A copy of the variables that a device iteration changes before its update.
//
// Most weights change after all micro-batches. Some variables change earlier:
// weights that the body of a loop reads after their update, buffers that
// forward changes (running statistics), and velocities that gradients are added
// to. When a run is stopped in the middle of a long device iteration, the
// iteration is discarded, and these variables get their old values back.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "runtime/memory.h"
#include "runtime/plan.h"

namespace popsim::runtime {

// The memory of each replica.
using Memories = std::vector<const DeviceMemory*>;

class Checkpoint {
 public:
  explicit Checkpoint(const Plan& plan);

  // The host wrote a value to the tensor, so the next run may read that value.
  void add_if_changed(graph::TensorId id);
  // Call it when a device iteration begins. It copies the variables only if
  // iterations take long, and for the first iteration, whose time is unknown.
  // In the other cases, a run that must stop continues to the end of the
  // iteration. It always copies if the program checks numbers or calls code of
  // the host, which may fail, waits for data between micro-batches, has loops
  // whose number of iterations is unknown, or updates weights in the middle of
  // an iteration.
  void begin(const Memories& memories);
  // Whether the device iteration can be discarded.
  [[nodiscard]] bool complete() const { return tensors_.empty() || copy_; }
  // After it, the next iteration counts as a first one again.
  void restore(const Memories& memories);

 private:
  using Clock = std::chrono::steady_clock;

  // Copies each instance of the variables to the copy, or back.
  void move(const Memories& memories, bool back);
  [[nodiscard]] int64_t bytes_of(graph::TensorId id) const;

  const Plan& plan_;
  const graph::Graph& graph_;
  bool always_;
  std::vector<bool> changed_;  // by TensorId
  std::vector<graph::TensorId> tensors_;
  std::unique_ptr<char[]> copy_;
  Clock::time_point last_begin_;
};

}  // namespace popsim::runtime
