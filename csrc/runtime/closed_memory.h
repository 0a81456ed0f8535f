// With AddressSanitizer, the memory of a device is poisoned: an op can access
// only its own operands, although all tensors share one block of memory.
// Without AddressSanitizer, this code does nothing.
#pragma once

#include "runtime/memory.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>
#endif

namespace popsim::runtime {

#if defined(__SANITIZE_ADDRESS__)

// Two ops at a time would close each other's tensors.
inline constexpr bool kMemoryCloses = true;

// Makes tensors accessible for a scope.
class OpenTensors {
 public:
  OpenTensors(const graph::Graph& graph, const DeviceMemory& memory,
              std::span<const graph::TensorId> ids) {
    for (const graph::TensorId id : ids) open(graph, memory, id);
  }
  OpenTensors(const graph::Graph& graph, const DeviceMemory& memory,
              const graph::Op& op)
      : OpenTensors(graph, memory, op.inputs) {
    for (const graph::TensorId id : op.outputs) open(graph, memory, id);
  }
  OpenTensors(const OpenTensors&) = delete;
  OpenTensors& operator=(const OpenTensors&) = delete;
  ~OpenTensors() {
    for (const auto& [start, bytes] : ranges_) {
      __asan_poison_memory_region(start, bytes);
    }
  }

 private:
  void open(const graph::Graph& graph, const DeviceMemory& memory,
            graph::TensorId id) {
    // The caller's memory is never poisoned, and the op that owns a body keeps
    // the body's memory accessible.
    if (id == graph::kNoTensor || memory.is_elsewhere(graph.root(id))) return;
    const graph::Tensor& tensor = graph.tensor(id);
    if (tensor.numel() == 0 || memory.pointer(id) == nullptr) return;
    int64_t reach = 1;
    for (size_t i = 0; i < tensor.shape.size(); ++i) {
      reach += (tensor.shape[i] - 1) * tensor.strides[i];
    }
    // AddressSanitizer works in units of eight bytes, so the range starts at a
    // multiple of eight, both here and when it is poisoned again.
    const auto first = reinterpret_cast<uintptr_t>(memory.pointer(id));
    const uintptr_t start = first / 8 * 8;
    const auto bytes = static_cast<size_t>(reach * size_in_bytes(tensor.dtype));
    ranges_.emplace_back(reinterpret_cast<void*>(start),
                         bytes + (first - start));
    __asan_unpoison_memory_region(ranges_.back().first, ranges_.back().second);
  }

  std::vector<std::pair<void*, size_t>> ranges_;
};

// The same, in the memory of all replicas: some ops use that of others.
class OpenReplicas {
 public:
  OpenReplicas(const graph::Graph& graph,
               const std::vector<const DeviceMemory*>& memories,
               const graph::Op& op) {
    for (const DeviceMemory* memory : memories) {
      open_.push_back(std::make_unique<OpenTensors>(graph, *memory, op));
    }
  }

 private:
  std::vector<std::unique_ptr<OpenTensors>> open_;
};

inline void close_memory(void* start, int64_t bytes) {
  __asan_poison_memory_region(start, static_cast<size_t>(bytes));
}

#else

inline constexpr bool kMemoryCloses = false;

class OpenTensors {
 public:
  template <typename What>
  OpenTensors(const graph::Graph& /*graph*/, const DeviceMemory& /*memory*/,
              const What& /*what*/) {}
};

class OpenReplicas {
 public:
  template <typename Memories>
  OpenReplicas(const graph::Graph& /*graph*/, const Memories& /*memories*/,
               const graph::Op& /*op*/) {}
};

inline void close_memory(void* /*start*/, int64_t /*bytes*/) {}

#endif

}  // namespace popsim::runtime
