// The memory of each tile over the steps of a program.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "machine/cost/cost.h"
#include "machine/estimate/places.h"
#include "machine/estimate/settings.h"

namespace popsim::machine {

// A part of the memory of an IPU.
struct Allocation {
  graph::TensorId tensor = graph::kNoTensor;  // kNoTensor: code
  MemoryClass purpose = MemoryClass::kActivations;
  int32_t ipu = 0;
  int64_t bytes = 0;  // of one copy, on all tiles
  Layout layout;      // of one copy
  int64_t copies = 1;
  int32_t first_op = -1;  // -1: always there
  int32_t last_op = -1;

  [[nodiscard]] bool is_live(int32_t op) const {
    return first_op < 0 || (first_op <= op && op <= last_op);
  }
};

struct LivePoint {
  int32_t op;
  int64_t worst;  // bytes on the fullest tile
  double mean;    // bytes, over all tiles
};

struct ClassBytes {
  int64_t worst = 0;  // on the fullest tile at the peak
  int64_t total = 0;  // on all tiles
};

struct IpuMemory {
  int32_t ipu = 0;
  int64_t peak = 0;  // bytes on the fullest tile
  double mean = 0;   // at the same step, over all tiles
  int64_t worst_tile = 0;
  int32_t peak_op = -1;
  int64_t always = 0;  // on the fullest tile
  std::array<ClassBytes, kNumMemoryClasses> classes;
  std::vector<int64_t> tiles;  // bytes at the peak
  std::vector<int64_t> always_tiles;
  std::vector<LivePoint> liveness;
};

struct Memory {
  std::vector<IpuMemory> ipus;
  std::vector<Allocation> allocations;
};

// How many copies of a value are kept because later micro-batches run between
// the action that writes it and the one that reads it; 0: it lives within one
// step of the schedule.
[[nodiscard]] int64_t stash_copies(schedule::Kind kind, int32_t depth,
                                   graph::Phase from_phase, int32_t from,
                                   graph::Phase to_phase, int32_t to);

// Whether each op's results are random numbers, or follow from nothing else:
// the backward pass makes them again instead of reading them from memory.
[[nodiscard]] std::vector<bool> redrawn_ops(const graph::Graph& graph);

[[nodiscard]] Memory plan_memory(const graph::Graph& graph,
                                 const Settings& settings, const Places& places,
                                 const std::vector<OpCost>& costs,
                                 Layouts& layouts);

}  // namespace popsim::machine
