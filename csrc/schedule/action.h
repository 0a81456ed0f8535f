// A schedule: the order of actions of one device iteration.
//
// The executor follows it, the memory plan counts stash slots in it, and the
// printer shows it. How many micro-batches are in flight and how long stages
// wait follows from it, too: it is written nowhere else. Its size does not grow
// with the number of micro-batches.
#pragma once

#include <cstdint>
#include <string>
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

// The action, `distance` micro-batches further.
[[nodiscard]] inline Action further(const Action& action, int64_t distance) {
  return action.kind == ActionKind::kUpdate
             ? action
             : Action{action.kind, action.stage, action.micro_batch + distance};
}

// Actions that run `times` times, each time one micro-batch further. What
// repeats takes every step of a micro-batch's way once, so that as many
// micro-batches are in flight after each time as before it.
struct Stretch {
  ActionList actions;  // as they run the first time
  int64_t times = 1;
  // Positions in `actions` at which a time begins. Stages with a device each
  // run the actions of one time together, the next time when all are done.
  // Empty where nobody knows, as in what was read from a text.
  std::vector<size_t> begins;
};

using Schedule = std::vector<Stretch>;

// What a schedule is generated from.
struct Config {
  int32_t num_stages = 1;
  int64_t num_micro_batches = 1;  // between two weight updates
  bool training = false;
};

enum class Kind : int8_t {
  // One micro-batch at a time through all stages, forward then backward.
  kSequential,
  // All stages work at once, each on another micro-batch; a micro-batch's
  // forward through the last stage is followed by its backward there.
  kPipelined,
  // A time for every slot, forwards and backwards of each stage: all stages run
  // forward, each on another micro-batch, then all of them backward. In
  // training twice as many micro-batches as stages are in flight.
  kGrouped,
  // The same, with a micro-batch at every second time of training: a stage
  // never has two slots at a time. As many micro-batches as stages are in
  // flight.
  kInterleaved,
};

// Throws UserError for an unknown name.
[[nodiscard]] Kind kind_called(const std::string& name);

[[nodiscard]] Schedule generate(Kind kind, const Config& config);

// Throws InternalError naming the first action that comes too early, is missing
// or stands twice.
void validate(const Schedule& schedule, const Config& config);

// The actions one by one, with each stretch repeated at most twice, as if there
// were fewer micro-batches. As many micro-batches are in flight as in the whole
// schedule, and the same kinds of actions follow each other.
[[nodiscard]] ActionList shortened(const Schedule& schedule);

// The actions of a stretch, time by time, as they run the first time.
[[nodiscard]] std::vector<ActionList> times_of(const Stretch& stretch);

// The most micro-batches that are in flight at one time: those that begin or
// end then, too. A program is pipelined where that is more than one.
[[nodiscard]] int64_t max_in_flight(const Schedule& schedule);

[[nodiscard]] std::string to_string(const Action& action);
// "0F0 1F0 1B0 0B0 U"; in a long schedule what repeats stands once, as in
// "(0F0 1F0 1B0 0B0)x1000000 U".
[[nodiscard]] std::string to_string(const Schedule& schedule);
// Reads what to_string() wrote. Throws UserError.
[[nodiscard]] Schedule parse(const std::string& text);

}  // namespace popsim::schedule
