// The context of a running kernel: memory, position, and the sinks of results.
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

class Exchange;
class HostCode;
struct NumberChecks;

// The numbers of iterations of one run.
struct LoopCounts {
  int64_t device_iterations = 1;
  int64_t gradient_accumulation = 1;  // micro-batches per device iteration
  int64_t replicas = 1;  // copies of the program, each on other micro-batches
};

// The position in the program's loops while a kernel runs.
struct Cursor {
  int64_t device_iteration = 0;
  int64_t accumulation_step = 0;  // micro-batch within the device iteration
  // Micro-batches of all replicas begun since the program was loaded, in the
  // order of a program of one replica that takes them one after the other.
  int64_t step = 0;
  int64_t replica = 0;
};

// Takes the entries that a run returns: those of a model output or of an
// anchor.
class Sink {
 public:
  virtual ~Sink() = default;
  // The address for an entry, which is contiguous.
  [[nodiscard]] virtual void* entry(int64_t index, int64_t bytes) = 0;
};

// Code that waits for another thread during a run asks it some times a second
// whether to go on waiting.
class Patience {
 public:
  virtual ~Patience() = default;
  // Returns false if the run must end: then the caller stops waiting.
  [[nodiscard]] virtual bool lasts() = 0;
};

// Takes elements that a program enqueues. All elements have the same number and
// types of tensors.
class Outlet {
 public:
  virtual ~Outlet() = default;
  // The addresses for the next element's tensors, each contiguous. May wait for
  // a reader as long as `patience` lasts; after that it gives addresses without
  // room for them. Empty if the element is not wanted; then end_element() is
  // not called. Throws UserError if no more elements can be taken.
  [[nodiscard]] virtual std::span<void* const> begin_element(
      Patience& patience) = 0;
  // The bytes of each tensor of an element.
  [[nodiscard]] virtual std::vector<int64_t> sizes() const = 0;
  // The element is complete; readers may take it.
  virtual void end_element() = 0;
};

// What a kernel can access while it runs.
class RunContext {
 public:
  virtual ~RunContext() = default;

  // The address of the first element of the tensor (of the view, for views). It
  // is valid only during this run() call: inputs and stashed tensors move
  // between micro-batches.
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

  void* const* pointers = nullptr;  // by TensorId
  // The pointers of each replica; empty if there is only one.
  std::span<void* const* const> of_replicas;
  std::span<Sink* const> sinks;      // by return
  std::span<Outlet* const> outlets;  // by queue that the program feeds
  Patience* patience = nullptr;      // for code that waits
  HostCode* host = nullptr;  // null if the program calls no code of the host
  Exchange* exchange = nullptr;    // null if this process trains alone
  NumberChecks* checks = nullptr;  // null: nothing is checked
  bool* ends = nullptr;  // set by an op that ends the run after this iteration
  LoopCounts loop;
  Cursor cursor;
  int64_t iterations_before = 0;  // device iterations finished by earlier runs
  uint64_t seed = 0;
};

}  // namespace popsim::ops
