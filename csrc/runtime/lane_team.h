// Lets the lanes of a program work at the same time, for teams of replicas.
//
// There is a worker for each lane of each team, which runs its actions for all
// replicas of the team. The caller's thread is the worker of the first lane of
// the first team, and threads of a crew are the others. Nothing keeps them in
// step but the waits of the plan, so each is as far ahead as the values that it
// needs, and the slots that it fills, allow. Teams need nothing of each other,
// except that the caller's thread takes the data of all replicas.
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

  LaneTeam(const Plan& plan, Lanes& lanes);

  // Whether the calling thread may use a thread for each worker in this call.
  [[nodiscard]] bool can_run(const Call& call) const;
  // Whether the caller's thread works on a lane of a replica.
  [[nodiscard]] bool is_of_caller(size_t replica, size_t lane) const;
  // What the caller's thread does besides its lane.
  enum class Verdict : int8_t { kGoOn, kFinish, kAbandon };
  struct Caller {
    // Asked before each action of its lane, and while it waits: to go on, to
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
    size_t replica;

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
  struct Worker {
    size_t team;
    size_t lane;
    size_t first_replica;
    size_t last_replica;  // not of the team
  };
  struct Iteration;

  [[nodiscard]] size_t block_of(const schedule::Action& action) const;
  void let_wait(size_t worker, ops::Patience* patience);
  // Where to see how far a team is with a block of the plan, or how many
  // micro-batches have begun (memory::Wait).
  [[nodiscard]] size_t counter(size_t team, size_t block) const {
    const size_t num_blocks = plan_.blocks().size();
    return block < num_blocks ? team * num_blocks + block : begun_;
  }
  void work(const Worker& worker, Iteration& iteration);
  // Returns whether the worker goes on.
  [[nodiscard]] bool run_step(const Worker& worker, const Step& step,
                              Position position, Iteration& iteration);
  // Runs the step's action for the replicas of the team. Returns false if an op
  // failed, or had to stop.
  [[nodiscard]] bool run_action(const Worker& worker,
                                const schedule::Action& action,
                                Position& position, Iteration& iteration);
  // Notes an error that is being handled.
  void note_error(const Position& position, int64_t micro_batch,
                  Iteration& iteration) const;
  // Takes the data of a micro-batch that begins. Returns false if there is none
  // and those in flight are to be finished.
  [[nodiscard]] bool take_elements(Iteration& iteration, int64_t index) const;
  // Releases the data of micro-batches that all teams have finished, after one
  // has finished a block.
  void release_elements(size_t block, const Iteration& iteration) const;
  // Number of micro-batches that all teams have finished.
  [[nodiscard]] int64_t num_finished() const;
  [[nodiscard]] int64_t num_begun_until(const Position& position) const;

  const Plan& plan_;
  Lanes& lanes_;
  std::vector<Worker> workers_;                  // the caller's first
  std::vector<std::vector<Stretch>> stretches_;  // by lane
  // By team and block; then the number of micro-batches that have begun.
  threads::Progress progress_;
  size_t begun_;
  threads::Crew crew_;
};

}  // namespace popsim::runtime
