#include "machine/estimate/memory.h"

#include <algorithm>

#include "machine/estimate/allocations.h"
#include "machine/estimate/tile_map.h"

namespace popsim::machine {
namespace {

// The allocations of one IPU, by the op at which they begin and end.
struct Changes {
  std::vector<const Allocation*> always;
  std::vector<std::vector<const Allocation*>> begin;
  std::vector<std::vector<const Allocation*>> end;
};

Changes changes_of(const std::vector<Allocation>& all, int32_t ipu,
                   size_t num_ops) {
  Changes changes{
      {}, decltype(Changes::begin)(num_ops), decltype(Changes::end)(num_ops)};
  for (const Allocation& one : all) {
    if (one.ipu != ipu) continue;
    if (one.first_op < 0) {
      changes.always.push_back(&one);
      continue;
    }
    changes.begin[static_cast<size_t>(one.first_op)].push_back(&one);
    changes.end[static_cast<size_t>(one.last_op)].push_back(&one);
  }
  return changes;
}

void sum_classes(const std::vector<Allocation>& all, int64_t tiles,
                 IpuMemory& memory) {
  for (const Allocation& one : all) {
    if (one.ipu != memory.ipu || !one.is_live(memory.peak_op)) continue;
    ClassBytes& sum = memory.classes[static_cast<size_t>(one.purpose)];
    sum.total += one.bytes * one.copies;
    sum.worst += bytes_on(one.layout, memory.worst_tile, tiles) * one.copies;
  }
}

// Temporaries take the same memory on all tiles.
IpuMemory memory_of(const graph::Graph& graph, const Settings& settings,
                    const Places& places, const std::vector<OpCost>& costs,
                    const std::vector<Allocation>& all, int32_t ipu) {
  const Changes changes = changes_of(all, ipu, graph.ops().size());
  IpuMemory memory{.ipu = ipu};
  TileMap tiles(settings.device.tiles);
  for (const Allocation* one : changes.always) {
    tiles.add(one->layout, one->copies);
  }
  memory.always = tiles.most();
  memory.always_tiles = tiles.bytes();
  memory.tiles = tiles.bytes();
  memory.peak = memory.always;
  memory.worst_tile = tiles.fullest();
  memory.mean = tiles.mean();
  int64_t temporaries = 0;
  for (size_t i = 0; i < graph.ops().size(); ++i) {
    if (places.ipu_of_op[i] != ipu) continue;
    if (graph.ops()[i].phase == graph::Phase::kSetup) continue;
    for (const Allocation* one : changes.begin[i]) {
      tiles.add(one->layout, one->copies);
    }
    const int64_t own = costs[i].temporary_bytes;
    const int64_t worst = tiles.most() + own;
    const double mean = tiles.mean() + static_cast<double>(own);
    memory.liveness.push_back({static_cast<int32_t>(i), worst, mean});
    if (worst > memory.peak) {
      memory.peak = worst;
      memory.mean = mean;
      memory.peak_op = static_cast<int32_t>(i);
      memory.worst_tile = tiles.fullest();
      memory.tiles = tiles.bytes();
      temporaries = own;
    }
    for (const Allocation* one : changes.end[i]) {
      tiles.add(one->layout, -one->copies);
    }
  }
  for (int64_t& bytes : memory.tiles) bytes += temporaries;
  sum_classes(all, settings.device.tiles, memory);
  memory.classes[static_cast<size_t>(MemoryClass::kTemporaries)] = {
      temporaries, temporaries * settings.device.tiles};
  return memory;
}

}  // namespace

Memory plan_memory(const graph::Graph& graph, const Settings& settings,
                   const Places& places, const std::vector<OpCost>& costs,
                   Layouts& layouts) {
  Memory memory;
  memory.allocations =
      find_allocations(graph, settings, places, costs, layouts);
  for (int32_t ipu = 0; ipu < places.num_ipus; ++ipu) {
    memory.ipus.push_back(
        memory_of(graph, settings, places, costs, memory.allocations, ipu));
  }
  return memory;
}

}  // namespace popsim::machine
