// When each action of a run began and ended.
//
// Each stage of each replica has memory of its own, and one thread at a time
// works on it. So threads note their actions without a lock, and nothing is
// allocated during a run.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "runtime/plan.h"
#include "schedule/action.h"

namespace popsim::runtime {

// The times of an action, in seconds from the beginning of its run.
struct ActionTime {
  schedule::ActionKind kind;
  int32_t replica;
  int32_t stage;
  // The micro-batch, counted from the start of the run; for the update, the
  // device iteration.
  int64_t index;
  double begin;
  double end;
  int32_t thread;  // 0: that of the caller
};

class Timeline {
 public:
  using Clock = std::chrono::steady_clock;

  // Throws UserError if a run has too many actions.
  explicit Timeline(const Plan& plan);

  // The time, if there is a timeline that wants to know it.
  [[nodiscard]] static Clock::time_point now(const Timeline* timeline) {
    return timeline == nullptr ? Clock::time_point{} : Clock::now();
  }

  // Forgets the run before.
  void begin_run();
  // The actions that follow run on several threads, or on that of the caller.
  void note_threads(bool parallel) { parallel_ = parallel; }
  // An action of a replica ends now. `index` is its micro-batch, counted from
  // the start of the run; for the update, the last one.
  void note(const schedule::Action& action, int32_t replica, int64_t index,
            Clock::time_point began);
  // The run has ended without an error.
  void end_run();

  [[nodiscard]] bool complete() const { return complete_; }
  [[nodiscard]] double seconds() const { return since_begin(ended_); }
  // The actions of the last run: by replica and stage, forward before backward,
  // then the updates. Those that did not run, because the run ended early, are
  // left out.
  [[nodiscard]] std::vector<ActionTime> actions() const;

 private:
  struct Span {
    Clock::time_point begin;
    Clock::time_point end;  // 0 if the action did not run
  };
  // The actions of one kind of a stage.
  struct Row {
    schedule::ActionKind kind;
    int32_t replica;
    int32_t stage;
    int32_t thread;
    std::vector<Span> spans;
  };

  [[nodiscard]] size_t row_of(const schedule::Action& action,
                              int32_t replica) const;
  [[nodiscard]] double since_begin(Clock::time_point time) const;

  size_t num_stages_;
  size_t num_passes_;  // of a replica: forward, and in training backward
  int64_t accumulation_;
  std::vector<Row> rows_;
  Clock::time_point began_;
  Clock::time_point ended_;
  bool parallel_ = false;
  bool complete_ = false;
};

}  // namespace popsim::runtime
