// A schedule: the order of actions of one device iteration.
//
// The executor follows it, the memory plan counts stash slots in it, and the
// printer shows it; it is written nowhere else. Its size does not grow with the
// number of micro-batches.
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
// micro-batches are in flight behind each time as before it.
struct Stretch {
  ActionList actions;  // as they run the first time
  int64_t times = 1;
};

using Schedule = std::vector<Stretch>;

// What a schedule is generated from.
struct Config {
  int32_t num_stages = 1;
  int64_t num_micro_batches = 1;  // between two weight updates
  bool training = false;
};

// One micro-batch at a time through all stages, forward then backward.
[[nodiscard]] Schedule sequential(const Config& config);
// All stages work at once, each on another micro-batch; a micro-batch's
// forward through the last stage is followed by its backward there.
[[nodiscard]] Schedule pipelined(const Config& config);
// A time for every slot, forwards and backwards of each stage: all stages run
// forward, each on another micro-batch, then all of them backward. In training
// twice as many micro-batches as stages are in flight.
[[nodiscard]] Schedule grouped(const Config& config);
// The same, with a micro-batch at every second time of training: a stage never
// has two slots at a time. As many micro-batches as stages are in flight.
[[nodiscard]] Schedule interleaved(const Config& config);
// The generator called `name`. Throws UserError for an unknown name.
[[nodiscard]] Schedule generate(const std::string& name, const Config& config);

// Throws InternalError naming the first action that comes too early, is missing
// or stands twice.
void validate(const Schedule& schedule, const Config& config);

// The actions one by one, with each stretch repeated at most twice, as if there
// were fewer micro-batches. As many micro-batches are in flight as in the whole
// schedule, and the same kinds of actions follow each other.
[[nodiscard]] ActionList shortened(const Schedule& schedule);

// The largest number of micro-batches that are in flight (first forward begun,
// last action not finished) at the same time.
[[nodiscard]] int64_t max_in_flight(const ActionList& actions);

[[nodiscard]] std::string to_string(const Action& action);
// "0F0 1F0 1B0 0B0 U"; in a long schedule what repeats stands once, as in
// "(0F0 1F0 1B0 0B0)x1000000 U".
[[nodiscard]] std::string to_string(const Schedule& schedule);
// Reads what to_string() wrote. Throws UserError.
[[nodiscard]] Schedule parse(const std::string& text);

}  // namespace popsim::schedule
