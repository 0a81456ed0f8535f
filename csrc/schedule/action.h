// A schedule: the ordered list of actions of one device iteration.
//
// The executor follows this list, the memory plan counts stash slots in it, and
// the printer shows it; it is written nowhere else.
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

// What a schedule is generated from.
struct Config {
  int32_t num_stages = 1;
  int64_t num_micro_batches = 1;  // between two weight updates
  bool training = false;
};

// One micro-batch at a time through all stages, forward then backward.
[[nodiscard]] ActionList sequential(const Config& config);
// All stages work at once, each on another micro-batch; a micro-batch's
// forward through the last stage is followed by its backward there.
[[nodiscard]] ActionList pipelined(const Config& config);
// The generator called `name`. Throws UserError for an unknown name.
[[nodiscard]] ActionList generate(const std::string& name,
                                  const Config& config);

// Throws InternalError naming the first action that comes too early, is missing
// or stands twice.
void validate(const ActionList& actions, const Config& config);

// The largest number of micro-batches that are in flight (first forward begun,
// last action not finished) at the same time.
[[nodiscard]] int64_t max_in_flight(const ActionList& actions);

[[nodiscard]] std::string to_string(const Action& action);
[[nodiscard]] std::string to_string(const ActionList& actions);
// Reads what to_string() wrote. Throws UserError.
[[nodiscard]] ActionList parse(const std::string& text);

}  // namespace popsim::schedule
