// The batch of a connectionist temporal classification (CTC): the labels of
// each item, and the states that an alignment of them passes through.
//
// The states of an item are its labels, with a blank before each label and
// after the last one. An alignment is in one state at each step. It begins in
// one of the first two states and ends in one of the last two. At each step it
// stays, goes to the next state, or skips a blank to a different label.
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
  // The place of the item's states among those of the batch, and the largest
  // possible number of them.
  int64_t column = 0;
  int64_t columns = 0;

  [[nodiscard]] int64_t states() const {
    return 2 * static_cast<int64_t>(labels.size()) + 1;
  }
};

// Indices of an op's inputs: log-probabilities [steps, items, classes]; labels,
// [items, most] or all in one row; input lengths and target lengths [items].
struct Inputs {
  size_t log_probs;
  size_t labels;
  size_t input_lengths;
  size_t target_lengths;
};

// Throws InternalError if the operands do not fit together.
void check_operands(const OpCall& op, const Inputs& inputs);
// The largest possible number of states of all items of a batch.
[[nodiscard]] int64_t num_columns(const OpCall& op, const Inputs& inputs);

class Batch {
 public:
  Batch(const OpView& op, const Inputs& inputs);

  // Call it once in each run, before item(). Throws UserError if lengths or
  // labels are out of range.
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
  // The largest number of states of an item.
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
