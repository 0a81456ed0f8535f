// How a run is stopped from outside.
#pragma once

#include <chrono>
#include <cstdint>

#include "base/check.h"
#include "ops/run_context.h"
#include "runtime/usage.h"

namespace popsim::runtime {

// A run ended before it was complete, because a stop was requested.
class Stopped : public UserError {
 public:
  using UserError::UserError;
};

// Supervises a run: the running thread asks it about ten times a second whether
// the run continues.
class Overseer {
 public:
  virtual ~Overseer() = default;
  [[nodiscard]] virtual bool lets_it_go_on() = 0;
};

// Tells a run that it must end, because a thread or the run's overseer asked
// for it.
class StopSign final : public ops::Patience {
 public:
  explicit StopSign(Usage& usage) : usage_(usage) {}

  // Call it before each run. `overseer` may be null.
  void begin_run(Overseer* overseer) {
    overseer_ = overseer;
    first_tick_ = true;
  }
  // The run calls it before each action.
  [[nodiscard]] bool up() {
    if (--countdown_ == 0) tick();
    return usage_.stopping();
  }
  // Whether it is known that the run must end; any thread may call it.
  [[nodiscard]] bool known() const { return usage_.stopping(); }
  // Code that waits calls it some times a second.
  [[nodiscard]] bool lasts() override {
    countdown_ = 1;
    return !up();
  }

 private:
  using Clock = std::chrono::steady_clock;

  void tick();

  Usage& usage_;
  Overseer* overseer_ = nullptr;
  // The clock is read once in this number of actions, counted over all runs: in
  // very short calls, the time to read it would matter.
  int32_t actions_per_tick_ = 1;
  int32_t countdown_ = 1;
  bool first_tick_ = true;  // the first tick of this run
  Clock::time_point last_tick_;
  Clock::time_point last_asked_;
};

}  // namespace popsim::runtime
