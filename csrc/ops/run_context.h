// What a kernel meets while it runs: memory, position, and who takes results.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/check.h"
#include "graph/graph.h"

namespace at {
class Tensor;
}

namespace popsim::ops {

class HostCode;

// How often one run goes through the program.
struct LoopCounts {
  int64_t device_iterations = 1;
  int64_t gradient_accumulation = 1;  // micro-batches per device iteration
};

// Where the program is while a kernel runs.
struct Cursor {
  int64_t device_iteration = 0;
  int64_t accumulation_step = 0;  // micro-batch within the device iteration
  int64_t step = 0;  // micro-batches begun since the program was loaded
};

// Takes what comes back from a run: a model output or an anchor, entry by
// entry.
class Sink {
 public:
  virtual ~Sink() = default;
  // Where the entry is to be written, contiguous.
  [[nodiscard]] virtual void* entry(int64_t index, int64_t bytes) = 0;
};

// Asked by what waits for another thread in the middle of a run, some times a
// second.
class Patience {
 public:
  virtual ~Patience() = default;
  // False where the run is to end: whoever waits then waits no longer.
  [[nodiscard]] virtual bool lasts() = 0;
};

// Takes elements that a program enqueues: some tensors each, always of the same
// types.
class Outlet {
 public:
  virtual ~Outlet() = default;
  // Where the next element's tensors are to be written, each contiguous. May
  // wait for a reader as long as patience lasts, and has a place all the same
  // when it ends. None where the element is not wanted, which then ends there.
  // Throws UserError where nothing can be taken any more.
  [[nodiscard]] virtual std::span<void* const> begin_element(
      Patience& patience) = 0;
  // Bytes of each tensor of an element.
  [[nodiscard]] virtual std::vector<int64_t> sizes() const = 0;
  // The element is written; readers may have it.
  virtual void end_element() = 0;
};

// What a kernel may touch while it runs.
class RunContext {
 public:
  virtual ~RunContext() = default;

  // First element of the tensor (of the view, for views). Valid for this run()
  // call only: inputs and stashed tensors move between micro-batches.
  template <typename T = void>
  [[nodiscard]] T* data(graph::TensorId id) const {
    return static_cast<T*>(pointers[id]);
  }
  // The same memory as an at::Tensor. Only for ids that the kernel named in
  // Kernel::at_tensors().
  [[nodiscard]] virtual const at::Tensor& tensor(graph::TensorId id) const = 0;
  [[nodiscard]] Sink& sink(int64_t index) const {
    check_internal(index < std::ssize(sinks), "return ", index,
                   " does not exist, the program has ", sinks.size());
    return *sinks[static_cast<size_t>(index)];
  }

  [[nodiscard]] Outlet& outlet(int64_t queue) const {
    check_user(queue < std::ssize(outlets),
               "the program enqueues to a queue that is not connected to it");
    return *outlets[static_cast<size_t>(queue)];
  }

  void* const* pointers = nullptr;   // by TensorId
  std::span<Sink* const> sinks;      // by return
  std::span<Outlet* const> outlets;  // by queue that the program feeds
  Patience* patience = nullptr;      // for what waits
  HostCode* host = nullptr;          // what the program may call, if anything
  bool* ends = nullptr;  // set by what ends the run after this iteration
  LoopCounts loop;
  Cursor cursor;
  int64_t iterations_before = 0;  // device iterations finished by earlier runs
  uint64_t seed = 0;
};

}  // namespace popsim::ops
