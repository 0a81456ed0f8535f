// Lets all lanes of a program work at the same time.
//
// The caller's thread works on lane 0, and threads of a crew on the others.
// Nothing keeps them in step but the waits of the plan, so each is as far ahead
// as the values that it needs, and the slots that it fills, allow.
#pragma once

#include <atomic>
#include <compare>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "runtime/lane.h"
#include "runtime/plan.h"
#include "threads/crew.h"
#include "threads/progress.h"

namespace popsim::runtime {

class LaneTeam {
 public:
  // What became of the actions of an iteration.
  struct Outcome {
    // Of an op: the first in the order of the schedule; null if none failed.
    std::exception_ptr error;
    bool abandoned = false;
    // There was no data for a further micro-batch of inference; else null.
    std::exception_ptr feed_end;
    // Micro-batches begun. After an error, those begun until then in the order
    // of the schedule.
    int64_t num_begun = 0;
    int64_t num_finished = 0;      // of them
    int64_t last_micro_batch = 0;  // the one that failed, or the last one begun
  };

  LaneTeam(const Plan& plan, std::vector<std::unique_ptr<Lane>>& lanes);

  // Whether the calling thread may use a thread for each lane in this call.
  [[nodiscard]] bool can_run(const Call& call) const;
  // What the caller's thread does besides lane 0.
  enum class Verdict : int8_t { kGoOn, kFinish, kAbandon };
  struct Caller {
    // Asked before each action of lane 0, and while it waits: to go on, to
    // begin no further micro-batch, or to leave everything as it is.
    std::function<Verdict()> asks;
    // A micro-batch begins: the number of those that have begun.
    std::function<void(int64_t)> begins;
  };
  // Runs all actions but the update: of one device iteration of training, or of
  // a whole run of inference. `first_key` is the key of the random numbers of
  // its first micro-batch.
  [[nodiscard]] Outcome run(const Call& call, int64_t iteration,
                            int64_t first_key, const Caller& caller);

 private:
  // The order of an action in the schedule.
  struct Position {
    size_t stretch;
    int64_t time;
    size_t action;

    friend auto operator<=>(const Position&, const Position&) = default;
  };
  struct Step {
    schedule::Action action;  // as it runs the first time
    size_t position;          // among the actions of its stretch
    size_t block;             // among those of the plan
  };
  struct Stretch {
    std::vector<Step> steps;
    int64_t times;
  };
  struct Iteration;

  [[nodiscard]] size_t block_of(const schedule::Action& action) const;
  void run_lane(size_t lane, Iteration& iteration);
  // Returns whether the lane goes on.
  [[nodiscard]] bool run_step(size_t lane, const Step& step,
                              const Position& position, Iteration& iteration);
  // Takes the data of a micro-batch that begins. Returns false if there is none
  // and those in flight are to be finished.
  [[nodiscard]] bool take_elements(Iteration& iteration, int64_t index) const;
  // Releases the data of a micro-batch if an action has finished it.
  void release_elements(const schedule::Action& action,
                        const Iteration& iteration, int64_t index) const;
  [[nodiscard]] int64_t num_begun_until(const Position& position) const;

  const Plan& plan_;
  std::vector<std::unique_ptr<Lane>>& lanes_;
  std::vector<std::vector<Stretch>> stretches_;  // by lane
  threads::Progress progress_;                   // by block
  threads::Crew crew_;
};

}  // namespace popsim::runtime
