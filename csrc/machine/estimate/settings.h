// What an estimate must know besides the program.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "graph/graph.h"
#include "machine/device.h"
#include "schedule/action.h"

namespace popsim::machine {

// What the memory of a tensor is for.
enum class MemoryClass : int8_t {
  kParameters,
  kState,
  kAccumulators,
  kStash,
  kActivations,
  kTemporaries,
  kCode,
  kStreams,
};
inline constexpr size_t kNumMemoryClasses = 8;

// Where a variable is kept, and how many replicas share one copy.
struct Placing {
  int64_t shards = 1;
  bool off_chip = false;
};

// How tensors come from the host.
enum class HostFeed : int8_t {
  kNone,     // the device makes them
  kStaged,   // the host copies them into place first, and the device waits
  kWaiting,  // they are in place when the device asks
};

struct Settings {
  Device device;
  int64_t io_tiles = 0;  // of each IPU, for input and output
  // The share of a tile's memory for the temporaries of products, by IPU.
  std::map<int32_t, double> proportions;
  double proportion = 0.6;  // of the other IPUs
  bool training = false;
  schedule::Kind schedule = schedule::Kind::kSequential;
  std::vector<int32_t> positions;
  std::map<int32_t, int32_t> ipu_of_stage;  // others: the number of the stage
  int64_t device_iterations = 1;
  int64_t gradient_accumulation = 1;
  int64_t replicas = 1;  // in all processes
  HostFeed feed = HostFeed::kStaged;
  bool overlaps_io = false;  // input and output run beside the computation
  std::map<graph::TensorId, MemoryClass> classes;  // of variables
  std::map<graph::TensorId, Placing> placings;     // of variables

  [[nodiscard]] double proportion_of(int32_t ipu) const {
    const auto found = proportions.find(ipu);
    return found == proportions.end() ? proportion : found->second;
  }
  [[nodiscard]] int32_t ipu_of(int32_t stage) const {
    const auto found = ipu_of_stage.find(stage);
    return found == ipu_of_stage.end() ? stage : found->second;
  }
  [[nodiscard]] int64_t compute_tiles() const {
    return device.tiles - io_tiles;
  }
  // Micro-batches of one replica in a call.
  [[nodiscard]] int64_t micro_batches() const {
    return training ? device_iterations * gradient_accumulation
                    : device_iterations;
  }
  // Micro-batches in one run of the schedule, and runs in a call.
  [[nodiscard]] int64_t scheduled() const {
    return training ? gradient_accumulation : device_iterations;
  }
  [[nodiscard]] int64_t repeats() const {
    return training ? device_iterations : 1;
  }
};

}  // namespace popsim::machine
