#include "ops/loss/ctc_batch.h"

namespace popsim::ops::ctc {

void check_operands(const OpCall& op, const Inputs& inputs) {
  op.require_rank(inputs.log_probs, 3);
  const Shape& shape = op.input(inputs.log_probs).shape;
  const int64_t items = shape[1];
  const Shape& labels = op.input(inputs.labels).shape;
  op.require(labels.size() == 1 || (labels.size() == 2 && labels[0] == items),
             "targets is one row of labels, or one row for each of ", items,
             " items");
  op.require_shape(inputs.input_lengths, {items});
  op.require_shape(inputs.target_lengths, {items});
  const int64_t blank = op.attribute<int64_t>("blank");
  op.require(blank < shape[2], "blank is the number of a class: ", blank);
  // Reserves memory for the states and classes of a batch and for their sums.
  const int64_t most = num_elements(labels) + items;
  op.require(is_valid_shape({4, most, shape[0]}),
             "the states have a valid shape");
}

int64_t num_columns(const OpCall& op, const Inputs& inputs) {
  return 2 * op.input(inputs.labels).numel() +
         op.input(inputs.log_probs).shape[1];
}

Batch::Batch(const OpView& op, const Inputs& inputs)
    : steps_(op.input(inputs.log_probs).shape[0]),
      classes_(op.input(inputs.log_probs).shape[2]),
      columns_(num_columns(op, inputs)),
      most_labels_(op.input(inputs.labels).shape.back()),
      most_states_(2 * most_labels_ + 1),
      in_one_row_(op.input(inputs.labels).shape.size() == 1),
      labels_(op, inputs.labels),
      input_lengths_(op, inputs.input_lengths),
      target_lengths_(op, inputs.target_lengths),
      items_(static_cast<size_t>(op.input(inputs.log_probs).shape[1])) {}

void Batch::read(const RunContext& context) {
  const std::span<const int64_t> labels = labels_.read(context);
  const std::vector<int64_t>& steps = input_lengths_.read(context);
  const std::vector<int64_t>& lengths = target_lengths_.read(context);
  int64_t first = 0;
  for (int64_t i = 0; i < size(); ++i) {
    const auto at = static_cast<size_t>(i);
    const int64_t length = lengths[at];
    check_item(i, steps[at], length);
    const int64_t room = in_one_row_ ? length : most_labels_;
    check_user(room <= static_cast<int64_t>(labels.size()) - first,
               "ctc_loss: the target lengths add up to more than the ",
               labels.size(), " labels of the concatenated targets");
    items_[at] = {
        steps[at],
        labels.subspan(static_cast<size_t>(first), static_cast<size_t>(length)),
        2 * first + i, 2 * room + 1};
    check_labels(items_[at].labels);
    first += room;
  }
  check_user(first == static_cast<int64_t>(labels.size()),
             "ctc_loss: the target lengths add up to ", first,
             ", the concatenated targets have ", labels.size(), " labels");
}

void Batch::check_item(int64_t i, int64_t steps, int64_t length) const {
  check_user(steps >= 0 && steps <= steps_, "ctc_loss: input length ", steps,
             " of item ", i, " is out of range: log_probs has ", steps_,
             " steps");
  check_user(length >= 0 && length <= most_labels_, "ctc_loss: target length ",
             length, " of item ", i, " is out of range: targets has ",
             most_labels_, in_one_row_ ? " labels" : " labels per item");
}

void Batch::check_labels(std::span<const int64_t> labels) const {
  for (const int64_t label : labels) {
    check_user(label >= 0 && label < classes_, "ctc_loss: target ", label,
               " is out of range: log_probs has ", classes_, " classes");
  }
}

}  // namespace popsim::ops::ctc
