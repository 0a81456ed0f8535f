// The time of a program: its slots, its updates, a whole call.
#pragma once

#include <cstdint>
#include <vector>

#include "machine/cost/cost.h"
#include "machine/estimate/places.h"
#include "machine/estimate/settings.h"

namespace popsim::machine {

// Cycles of the parts of some work; they add up.
struct Parts {
  double compute = 0;
  double exchange = 0;
  double sync = 0;
  double glue = 0;
  double links = 0;  // copies between IPUs
  double host = 0;
  double update = 0;  // of the weights
  double all_reduce = 0;
  double waiting = 0;  // for other IPUs

  void add(const OpCost& cost);
  void add(const Parts& other, double times);
  [[nodiscard]] double sum() const;
};

struct SlotAction {
  schedule::ActionKind kind = schedule::ActionKind::kForward;
  int32_t stage = 0;
  int32_t ipu = 0;
  int64_t micro_batch = 0;
  double cycles = 0;
};

// A time step of the schedule: its actions, then the copies between IPUs.
struct Slot {
  double cycles = 0;  // with link_cycles
  double link_cycles = 0;
  std::vector<SlotAction> actions;
};

struct SlotStretch {
  int64_t times = 1;
  std::vector<Slot> slots;
};

struct Link {
  int32_t from = 0;
  int32_t to = 0;
  bool backward = false;
  double bytes = 0;  // of one micro-batch
  double cycles = 0;
};

struct IpuTime {
  double busy = 0;  // cycles in one run of the schedule, with its update
  double use = 0;   // share of the run
  Parts call;       // of a whole call
};

struct Traffic {  // of one replica in a call
  double all_reduce_bytes = 0;
  int64_t all_reduces = 0;
  double host_in_bytes = 0;
  double host_out_bytes = 0;
  double off_chip_bytes = 0;
};

struct Latency {  // seconds of a micro-batch
  double host_to_ipu = 0;
  double compute = 0;
  double ipu_to_host = 0;
};

struct ProgramTime {
  std::vector<SlotStretch> stretches;
  double run_cycles = 0;     // one run of the schedule, with its update
  double update_cycles = 0;  // of the slowest IPU, without the sum
  double all_reduce_cycles = 0;
  double call_cycles = 0;
  std::vector<IpuTime> ipus;
  std::vector<Link> links;
  Traffic traffic;
  Latency latency;
};

[[nodiscard]] ProgramTime plan_time(const graph::Graph& graph,
                                    const Settings& settings,
                                    const Places& places,
                                    const std::vector<OpCost>& costs);

}  // namespace popsim::machine
