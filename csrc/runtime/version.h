// A program that is ready to run on the memory of its device.
//
// A second, observed version of a program may lie beside the plain one. It
// computes the same and, in addition, statistics of its values. The two share
// all constants and variables, so each device iteration may run either.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "runtime/checkpoint.h"
#include "runtime/lane.h"
#include "runtime/lane_team.h"
#include "runtime/memory.h"
#include "runtime/plan.h"

namespace popsim::runtime {

class Version {
 public:
  // Prepares every kernel and allocates all memory. The plan, and the version
  // beside it, which may be null, must outlive it.
  Version(const Plan& plan, const Version* beside);

  // Runs the setup ops. Call it once, after the constants are written.
  void load(std::span<Listener* const> listeners);
  // Takes what a call gives to all ops.
  void begin_run(const Call& call, int64_t iterations_before, bool* ended,
                 ops::NumberChecks* checks);

  const Plan& plan;
  DeviceStorage storage;
  Lanes lanes;        // by replica
  Memories memories;  // by replica: that of its first lane
  LaneTeam team;

 private:
  std::vector<void* const*> pointers_;  // by replica
};

}  // namespace popsim::runtime
