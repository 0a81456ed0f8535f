// How a run is ended from outside.
#pragma once

#include <chrono>
#include <cstdint>

#include "base/check.h"
#include "ops/run_context.h"
#include "runtime/usage.h"

namespace popsim::runtime {

// A run ended before it was complete, because it was asked to.
class Stopped : public UserError {
 public:
  using UserError::UserError;
};

// Looks after a run: asked about ten times a second, on the thread that runs.
class Overseer {
 public:
  virtual ~Overseer() = default;
  [[nodiscard]] virtual bool lets_it_go_on() = 0;
};

// Tells a run that it is to end: some thread asked for it, or its overseer.
class StopSign final : public ops::Patience {
 public:
  explicit StopSign(Usage& usage) : usage_(usage) {}

  // To be called before each run. `overseer` may be null.
  void begin_run(Overseer* overseer) {
    overseer_ = overseer;
    first_tick_ = true;
  }
  // To be asked before each action.
  [[nodiscard]] bool up() {
    if (--countdown_ == 0) tick();
    return usage_.stopping();
  }
  // To be asked some times a second by what waits.
  [[nodiscard]] bool lasts() override {
    countdown_ = 1;
    return !up();
  }

 private:
  using Clock = std::chrono::steady_clock;

  void tick();

  Usage& usage_;
  Overseer* overseer_ = nullptr;
  // The clock is read once in so many actions, over all runs: in calls that do
  // next to nothing, reading it would be felt.
  int32_t actions_per_tick_ = 1;
  int32_t countdown_ = 1;
  bool first_tick_ = true;  // of this run
  Clock::time_point last_tick_;
  Clock::time_point last_asked_;
};

}  // namespace popsim::runtime
