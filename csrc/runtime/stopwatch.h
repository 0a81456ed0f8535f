// A listener that measures the time of every op, run by run.
#pragma once

#include <chrono>
#include <vector>

#include "graph/graph.h"
#include "runtime/listener.h"

namespace popsim::runtime {

// The time of an op in the runs of a profile.
struct OpTime {
  int64_t op;          // position in Graph::ops()
  int64_t executions;  // in one run
  double seconds;      // of all executions in one run: the median over the runs
};

class Stopwatch final : public Listener {
 public:
  explicit Stopwatch(const graph::Graph& graph)
      : graph_(graph), ops_(graph.ops().size()) {}

  void before_action() override { last_ = Clock::now(); }
  // One reading of the clock is the end of an op and the start of the next one.
  void after(const graph::Op& op, const ops::RunContext& context) override;
  void end_run();
  // One time per op that ran.
  [[nodiscard]] std::vector<OpTime> times();

 private:
  using Clock = std::chrono::steady_clock;
  struct Laps {
    double seconds = 0;
    int64_t executions = 0;
    std::vector<double> runs;
  };

  const graph::Graph& graph_;
  std::vector<Laps> ops_;
  Clock::time_point last_;
};

}  // namespace popsim::runtime
