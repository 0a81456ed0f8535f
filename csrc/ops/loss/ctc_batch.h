// The batch of a connectionist temporal classification: which labels each item
// has, and the states that an alignment of them goes through.
//
// The states of an item are its labels with a blank in front of each and behind
// the last. An alignment is in one state at each step: it begins in one of the
// first two, ends in one of the last two, and stays, goes on to the next state,
// or past a blank to another label.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ops/op_def.h"
#include "ops/operands/indices.h"

namespace popsim::ops::ctc {

struct Item {
  int64_t steps = 0;
  std::span<const int64_t> labels;
  // Where its states are among those of the batch, and how many there might be.
  int64_t column = 0;
  int64_t columns = 0;

  [[nodiscard]] int64_t states() const {
    return 2 * static_cast<int64_t>(labels.size()) + 1;
  }
};

// Numbers of an op's inputs: log-probabilities [steps, items, classes]; labels,
// [items, most] or all in one row; input lengths and target lengths [items].
struct Inputs {
  size_t log_probs;
  size_t labels;
  size_t input_lengths;
  size_t target_lengths;
};

// Throws InternalError for operands that do not belong together.
void check_operands(const OpCall& op, const Inputs& inputs);
// How many states the items of a batch might have together.
[[nodiscard]] int64_t num_columns(const OpCall& op, const Inputs& inputs);

class Batch {
 public:
  Batch(const OpView& op, const Inputs& inputs);

  // To be called before item(), once in a run. Throws UserError for lengths and
  // labels out of range.
  void read(const RunContext& context);
  [[nodiscard]] const Item& item(int64_t i) const {
    return items_[static_cast<size_t>(i)];
  }

  [[nodiscard]] int64_t size() const {
    return static_cast<int64_t>(items_.size());
  }
  [[nodiscard]] int64_t steps() const { return steps_; }
  [[nodiscard]] int64_t classes() const { return classes_; }
  [[nodiscard]] int64_t columns() const { return columns_; }
  // States that an item has at most.
  [[nodiscard]] int64_t most_states() const { return most_states_; }

 private:
  void check_item(int64_t i, int64_t steps, int64_t length) const;
  void check_labels(std::span<const int64_t> labels) const;

  int64_t steps_;
  int64_t classes_;
  int64_t columns_;
  int64_t most_labels_;  // of an item
  int64_t most_states_;
  bool in_one_row_;
  IndexInput labels_;
  IndexInput input_lengths_;
  IndexInput target_lengths_;
  std::vector<Item> items_;
};

}  // namespace popsim::ops::ctc
