// The memory of one simulated device and the addresses of its tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "graph/graph.h"
#include "runtime/plan.h"

namespace popsim::runtime {

// The memory itself: an arena for each replica, and the persistent tensors.
class DeviceStorage {
 public:
  // `beside` is the memory of the program beside that of the plan, or null.
  explicit DeviceStorage(const Plan& plan, const DeviceStorage* beside);

  [[nodiscard]] char* arena(int32_t replica) const {
    return arenas_[static_cast<size_t>(replica)].get();
  }
  [[nodiscard]] char* persistent() const { return persistent_.get(); }
  // That of the program beside this one; null if there is none.
  [[nodiscard]] char* beside() const { return beside_; }

 private:
  struct FreeDeleter {
    void operator()(void* memory) const;
  };

  std::vector<std::unique_ptr<char, FreeDeleter>> arenas_;  // by replica
  std::unique_ptr<char, FreeDeleter> persistent_;
  char* beside_;
};

// Knows the current address of every tensor.
class DeviceMemory {
 public:
  // Looks at the storage as one lane of a replica does. The plan and the
  // storage must outlive it.
  DeviceMemory(const Plan& plan, const DeviceStorage& storage, int32_t replica);
  // The memory of a body: a part of `arena`, which belongs to the body's op.
  // The body's inputs and results are stored elsewhere.
  DeviceMemory(const graph::Graph& body, const memory::ArenaPlan& plan,
               char* arena);

  // By TensorId. Inputs are null until bound.
  [[nodiscard]] void* const* pointers() const { return pointers_.data(); }
  [[nodiscard]] void* pointer(graph::TensorId id) const {
    return pointers_[static_cast<size_t>(id)];
  }
  // Moves a tensor, its views and their at::Tensor objects to another address.
  void bind(graph::TensorId root, void* address);
  // Whether a tensor is bound to an address outside the device's memory.
  [[nodiscard]] bool is_elsewhere(graph::TensorId root) const {
    return elsewhere_[static_cast<size_t>(root)];
  }
  // The address of the memory that an op has for its bodies.
  [[nodiscard]] char* start_of(const memory::BodyPlacement& bodies) const {
    return start_ + bodies.offset;
  }
  // The stashed tensors among these, for select_slots().
  [[nodiscard]] std::vector<size_t> stashes_among(
      std::span<const graph::TensorId> roots) const;
  // Moves stashed tensors to the slots that belong to a micro-batch.
  void select_slots(std::span<const size_t> stashes, int64_t micro_batch);

  // Makes tensor(id) available. Call it before the first run.
  void make_tensor(graph::TensorId id);
  [[nodiscard]] const at::Tensor& tensor(graph::TensorId id) const {
    return tensors_[static_cast<size_t>(id)];
  }

 private:
  struct View {
    graph::TensorId id;
    int64_t offset_bytes;
  };
  struct Stash {
    graph::TensorId root;
    char* start;
    int64_t slot_bytes;
    int64_t num_slots;
  };

  void find_views();
  void place(const memory::ArenaPlan& plan);
  // Places tensors at these offsets from `start`; -1: not there.
  void place(const Plan& plan, const std::vector<int64_t>& offsets, char* start,
             int32_t replica);
  at::Storage& storage(graph::TensorId root);

  const graph::Graph& graph_;
  char* start_;                  // of the arena, which another object owns
  std::vector<bool> elsewhere_;  // by root
  std::vector<void*> pointers_;
  std::vector<std::vector<View>> views_;  // by root
  std::vector<Stash> stashes_;
  std::unordered_map<graph::TensorId, at::Storage> storages_;
  std::vector<at::Tensor> tensors_;
};

}  // namespace popsim::runtime
