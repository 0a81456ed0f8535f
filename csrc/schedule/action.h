// A schedule: the order of actions of one device iteration.
//
// The executor follows the schedule, the memory plan counts stash slots in it,
// and the printer shows it. It also determines how many micro-batches are in
// flight and how long stages wait; no other data say so. Its size does not grow
// with the number of micro-batches.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace popsim::schedule {

enum class ActionKind : int8_t { kForward, kBackward, kUpdate };

// One stage's work on one micro-batch ("2F0": stage 2, forward, micro-batch 0),
// or the weight update of all stages ("U").
struct Action {
  ActionKind kind = ActionKind::kForward;
  int32_t stage = 0;
  int64_t micro_batch = 0;

  friend bool operator==(const Action&, const Action&) = default;
};

using ActionList = std::vector<Action>;

// The same action, `distance` micro-batches later.
[[nodiscard]] inline Action further(const Action& action, int64_t distance) {
  return action.kind == ActionKind::kUpdate
             ? action
             : Action{action.kind, action.stage, action.micro_batch + distance};
}

// Actions that run `times` times, each time one micro-batch later. A repeated
// stretch contains every action of one micro-batch once, so the number of
// micro-batches in flight is the same before and after each repetition.
struct Stretch {
  ActionList actions;  // as in the first repetition
  int64_t times = 1;
  // The positions in `actions` at which a time step begins. If each stage has
  // its own device, the stages run the actions of one time step together, and
  // the next time step begins when all are done. Empty if unknown, as in a
  // schedule that was parsed from a string.
  std::vector<size_t> begins;
};

using Schedule = std::vector<Stretch>;

// The parameters of a generated schedule.
struct Config {
  int32_t num_stages = 1;
  int64_t num_micro_batches = 1;  // between two weight updates
  bool training = false;
  // The position of each stage in the pipeline, in ascending order. Stages at
  // one position are concurrent: they work on the same micro-batch at the same
  // time. Empty if each stage has a position of its own.
  std::vector<int32_t> positions = {};
};

// The position of a stage in the pipeline.
[[nodiscard]] inline int32_t position_of(const std::vector<int32_t>& positions,
                                         int32_t stage) {
  return positions.empty() ? stage : positions[static_cast<size_t>(stage)];
}

// Throws UserError unless there is a position for each stage, and the positions
// count from 0 without a gap.
void check_positions(const std::vector<int32_t>& positions, int32_t num_stages);

enum class Kind : int8_t {
  // One micro-batch at a time through all stages, forward then backward.
  kSequential,
  // All stages work at the same time, each on another micro-batch; the backward
  // of a micro-batch on the last stage follows directly after its forward
  // there.
  kPipelined,
  // A time step for each forward and backward of each stage: all stages run
  // forward, each on another micro-batch, then all of them run backward. In
  // training twice as many micro-batches as stages are in flight.
  kGrouped,
  // The same, but in training a micro-batch begins only at every second time
  // step: a stage never has two actions at the same time. As many micro-batches
  // as stages are in flight.
  kInterleaved,
};

// Throws UserError for an unknown name.
[[nodiscard]] Kind kind_called(const std::string& name);

[[nodiscard]] Schedule generate(Kind kind, const Config& config);

// Throws InternalError with the first action that comes too early, is missing
// or is there twice.
void validate(const Schedule& schedule, const Config& config);

// The actions one by one, with each stretch repeated at most twice, as if there
// were fewer micro-batches. The number of micro-batches in flight is that of
// the whole schedule, and the same kinds of actions follow each other.
[[nodiscard]] ActionList shortened(const Schedule& schedule);

// The actions of a stretch, by time step, as in the first repetition.
[[nodiscard]] std::vector<ActionList> times_of(const Stretch& stretch);

// For each stretch the number of its repetitions, and the actions of the first
// one by time step, as strings ("2F0").
using TimeTable =
    std::vector<std::pair<int64_t, std::vector<std::vector<std::string>>>>;
[[nodiscard]] TimeTable time_table(const Schedule& schedule);

// The largest number of micro-batches that are in flight at the same time,
// including those that begin or end at that time. A program is pipelined if
// this number is more than one.
[[nodiscard]] int64_t max_in_flight(const Schedule& schedule);

// "F", "B" or "U".
[[nodiscard]] const char* kind_letter(ActionKind kind);
[[nodiscard]] std::string to_string(const Action& action);
// "0F0 1F0 1B0 0B0 U"; a long schedule shows repeated actions once, as in "(0F0
// 1F0 1B0 0B0)x1000000 U".
[[nodiscard]] std::string to_string(const Schedule& schedule);
// Reads what to_string() wrote. Throws UserError if the string is not a
// schedule.
[[nodiscard]] Schedule parse(const std::string& text);

}  // namespace popsim::schedule
