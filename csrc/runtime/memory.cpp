#include "runtime/memory.h"

#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "base/numbers.h"
#include "ops/operands/aten_types.h"
#include "runtime/closed_memory.h"

namespace popsim::runtime {
namespace {

using graph::TensorId;
using graph::TensorKind;

// The memory is zeroed: if a value is read before it is written, it is zero in
// every run and never an old value of another tensor.
char* allocate(int64_t bytes) {
  const auto size = static_cast<size_t>(
      std::max(round_up(bytes, memory::kAlignment), memory::kAlignment));
  void* memory =
      std::aligned_alloc(static_cast<size_t>(memory::kAlignment), size);
  if (memory == nullptr) throw std::bad_alloc();
  std::memset(memory, 0, size);
  close_memory(memory, static_cast<int64_t>(size));
  return static_cast<char*>(memory);
}

}  // namespace

void DeviceStorage::FreeDeleter::operator()(void* memory) const {
  std::free(memory);
}

DeviceStorage::DeviceStorage(const Plan& plan, const DeviceStorage* beside)
    : persistent_(allocate(plan.persistent().bytes)),
      beside_(beside == nullptr ? nullptr : beside->persistent()) {
  for (int32_t r = 0; r < plan.replicas().count; ++r) {
    arenas_.emplace_back(allocate(plan.arena().arena_bytes));
  }
}

DeviceMemory::DeviceMemory(const Plan& plan, const DeviceStorage& storage,
                           int32_t replica)
    : graph_(plan.graph()),
      start_(storage.arena(replica)),
      elsewhere_(graph_.tensors().size()),
      pointers_(graph_.tensors().size(), nullptr),
      views_(graph_.tensors().size()),
      tensors_(graph_.tensors().size()) {
  for (const TensorId id : plan.inputs()) {
    elsewhere_[static_cast<size_t>(id)] = true;
  }
  find_views();
  const memory::PersistentPlan& persistent = plan.persistent();
  place(plan, persistent.offsets, storage.persistent(), replica);
  place(plan, persistent.offsets_beside, storage.beside(), replica);
  place(plan.arena());
}

DeviceMemory::DeviceMemory(const graph::Graph& body,
                           const memory::ArenaPlan& plan, char* arena)
    : graph_(body),
      start_(arena),
      elsewhere_(graph_.tensors().size()),
      pointers_(graph_.tensors().size(), nullptr),
      views_(graph_.tensors().size()),
      tensors_(graph_.tensors().size()) {
  for (const TensorId id : graph::inputs_of(body)) {
    elsewhere_[static_cast<size_t>(id)] = true;
  }
  for (const TensorId id : graph::results_of(body)) {
    elsewhere_[static_cast<size_t>(id)] = true;
  }
  find_views();
  place(plan);
}

void DeviceMemory::find_views() {
  for (size_t i = 0; i < graph_.tensors().size(); ++i) {
    const graph::Tensor& t = graph_.tensors()[i];
    if (t.kind != TensorKind::kView) continue;
    views_[static_cast<size_t>(t.base)].push_back(
        {static_cast<TensorId>(i), t.offset * size_in_bytes(t.dtype)});
  }
}

void DeviceMemory::place(const Plan& plan, const std::vector<int64_t>& offsets,
                         char* start, int32_t replica) {
  for (size_t i = 0; i < offsets.size(); ++i) {
    if (offsets[i] < 0) continue;
    const std::vector<int32_t>& instances = plan.instances()[i];
    const int64_t instance =
        instances.empty() ? 0 : instances[static_cast<size_t>(replica)];
    bind(static_cast<TensorId>(i),
         start + offsets[i] + instance * plan.persistent().strides[i]);
  }
}

void DeviceMemory::place(const memory::ArenaPlan& plan) {
  for (size_t i = 0; i < plan.placements.size(); ++i) {
    const memory::Placement& placement = plan.placements[i];
    if (placement.offset < 0) continue;
    const auto id = static_cast<TensorId>(i);
    char* start = start_ + placement.offset;
    bind(id, start);
    if (placement.num_slots > 1) {
      stashes_.push_back(
          {id, start, placement.slot_bytes, placement.num_slots});
    }
  }
}

void DeviceMemory::bind(TensorId root, void* address) {
  if (pointer(root) == address) return;
  pointers_[static_cast<size_t>(root)] = address;
  for (const View& view : views_[static_cast<size_t>(root)]) {
    pointers_[static_cast<size_t>(view.id)] =
        static_cast<char*>(address) + view.offset_bytes;
  }
  const auto found = storages_.find(root);
  if (found != storages_.end()) {
    found->second.unsafeGetStorageImpl()->set_data_ptr_noswap(
        at::DataPtr(address, at::kCPU));
  }
}

std::vector<size_t> DeviceMemory::stashes_among(
    std::span<const TensorId> roots) const {
  std::vector<size_t> found;
  for (size_t i = 0; i < stashes_.size(); ++i) {
    const bool is_one =
        std::ranges::find(roots, stashes_[i].root) != roots.end();
    if (is_one) found.push_back(i);
  }
  return found;
}

void DeviceMemory::select_slots(std::span<const size_t> stashes,
                                int64_t micro_batch) {
  for (const size_t i : stashes) {
    const Stash& stash = stashes_[i];
    bind(stash.root,
         stash.start + micro_batch % stash.num_slots * stash.slot_bytes);
  }
}

at::Storage& DeviceMemory::storage(TensorId root) {
  const auto found = storages_.find(root);
  if (found != storages_.end()) return found->second;
  at::Storage storage(at::Storage::use_byte_size_t(),
                      static_cast<size_t>(graph_.tensor(root).bytes()),
                      at::DataPtr(pointer(root), at::kCPU),
                      /*allocator=*/nullptr, /*resizable=*/false);
  return storages_.emplace(root, std::move(storage)).first->second;
}

void DeviceMemory::make_tensor(TensorId id) {
  at::Tensor& face = tensors_[static_cast<size_t>(id)];
  if (face.defined()) return;
  const graph::Tensor& t = graph_.tensor(id);
  face = at::empty({0}, ops::to_scalar_type(t.dtype));
  at::TensorImpl* impl = face.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage(graph_.root(id)));
  impl->set_storage_offset(t.kind == TensorKind::kView ? t.offset : 0);
  impl->set_sizes_and_strides(t.shape, t.strides);
}

}  // namespace popsim::runtime
