// Finds the most likely labels of each sequence in a batch; the alignment of
// labels and steps is unknown.
#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "ops/countable.h"
#include "ops/decode/beam_search.h"
#include "ops/op_def.h"
#include "ops/operands/indices.h"
#include "ops/operands/rows.h"
#include "threads/tasks.h"

namespace popsim::ops {
namespace {

// A limit for the sequences that a search may visit: their memory is allocated
// before it starts.
constexpr int64_t kMostSequences = int64_t{1} << 26;
// The cost of an entry of the beam or of a class at each step, in additions.
constexpr int64_t kCost = 100;

decode::BeamSpec spec_of(const OpCall& op) {
  const Shape& shape = op.input(0).shape;
  return {.steps = shape[0],
          .classes = shape[2],
          .blank = op.attribute<int64_t>("blank"),
          .width = op.attribute<int64_t>("beam_width")};
}

int64_t num_entries(const OpView& op) {
  const decode::BeamSpec spec = spec_of(op);
  return countable(static_cast<double>(op.input(0).shape[1] * spec.steps) *
                   static_cast<double>(spec.width + spec.classes));
}

class CtcBeamSearch final : public Kernel {
 public:
  explicit CtcBeamSearch(const OpView& op)
      : spec_(spec_of(op)),
        num_items_(op.input(0).shape[1]),
        num_paths_(op.attribute<int64_t>("top_paths")),
        log_probs_(op, 0, spec_.classes),
        lengths_(op, 1),
        shares_(threads::additions(kCost * num_entries(op)), num_items_) {
    if (op.has_output(0)) probabilities_.emplace(op, 0, num_paths_);
    if (op.has_output(1)) path_lengths_ = op.output_id(1);
    if (op.has_output(2)) paths_ = op.output_id(2);
    for (int64_t i = 0; i < shares_.limit(); ++i) {
      scratch_.push_back(
          {decode::BeamSearch(spec_),
           std::vector<float>(static_cast<size_t>(padded(spec_.classes))),
           std::vector<float>(static_cast<size_t>(num_paths_))});
    }
  }

  void run(const RunContext& context) override {
    const std::vector<int64_t>& lengths = lengths_.read(context);
    for (size_t i = 0; i < lengths.size(); ++i) {
      check_user(lengths[i] >= 0 && lengths[i] <= spec_.steps,
                 "ctc_beam_search_decoder: length ", lengths[i], " of item ", i,
                 " is out of range: probs has ", spec_.steps, " steps");
    }
    shares_.run([&](int64_t share, threads::Range items) {
      Scratch& scratch = scratch_[static_cast<size_t>(share)];
      for (int64_t i = items.begin; i < items.end; ++i) {
        const bool has_paths =
            search(context, i, lengths[static_cast<size_t>(i)], scratch);
        write(context, i, has_paths, scratch);
      }
    });
  }

 private:
  struct Scratch {
    decode::BeamSearch search;
    std::vector<float> log_probs;
    std::vector<float> probabilities;
  };

  // Returns false if the log-probabilities of a step are not valid.
  [[nodiscard]] bool search(const RunContext& context, int64_t item,
                            int64_t length, Scratch& scratch) const {
    scratch.search.begin();
    for (int64_t step = 0; step < length; ++step) {
      const float* log_probs = log_probs_.read(
          context, step * num_items_ + item, scratch.log_probs.data());
      if (!scratch.search.advance(log_probs)) return false;
    }
    return true;
  }

  // If fewer paths were found than requested, the other paths have no labels.
  // All probabilities are NaN if the search failed.
  void write(const RunContext& context, int64_t item, bool has_paths,
             Scratch& scratch) const {
    const decode::BeamSearch& found = scratch.search;
    const float missing = has_paths ? -std::numeric_limits<float>::infinity()
                                    : std::numeric_limits<float>::quiet_NaN();
    for (int64_t p = 0; p < num_paths_; ++p) {
      const bool is_there = p < found.size();
      const int64_t length = is_there ? found.length(p) : 0;
      const int64_t row = item * num_paths_ + p;
      scratch.probabilities[static_cast<size_t>(p)] =
          is_there ? static_cast<float>(found.log_probability(p)) : missing;
      if (path_lengths_) context.data<int64_t>(*path_lengths_)[row] = length;
      if (!paths_) continue;
      int64_t* labels = context.data<int64_t>(*paths_) + row * spec_.steps;
      if (is_there) found.read(p, labels);
      std::fill(labels + length, labels + spec_.steps, spec_.blank);
    }
    if (probabilities_) {
      probabilities_->write(context, item, 0, num_paths_,
                            scratch.probabilities.data());
    }
  }

  decode::BeamSpec spec_;
  int64_t num_items_;
  int64_t num_paths_;
  RowInput log_probs_;
  IndexInput lengths_;
  std::optional<RowOutput> probabilities_;
  std::optional<graph::TensorId> path_lengths_;
  std::optional<graph::TensorId> paths_;
  threads::Shares shares_;
  std::vector<Scratch> scratch_;  // by share
};

std::vector<TensorType> decoded_types(const OpCall& op) {
  op.require_rank(0, 3);
  const Shape& shape = op.input(0).shape;
  op.require_shape(1, {shape[1]});
  const decode::BeamSpec spec = spec_of(op);
  const int64_t paths = op.attribute<int64_t>("top_paths");
  op.require(spec.blank < spec.classes,
             "blank is the number of a class: ", spec.blank);
  op.require(spec.classes <= std::numeric_limits<int32_t>::max(),
             "the numbers of classes fit into 32 bits");
  op.require(paths <= spec.width,
             "the beam is at least as wide as the number of paths");
  op.require(std::max<int64_t>(spec.steps, 1) <= kMostSequences / spec.width,
             "the sequences of labels fit into memory");
  const Shape of_paths{shape[1], paths};
  const Shape of_labels{shape[1], paths, shape[0]};
  op.require(is_valid_shape(of_labels), "the labels have a valid shape");
  return {{op.input(0).dtype, of_paths},
          {DType::kInt64, of_paths},
          {DType::kInt64, of_labels}};
}

std::vector<graph::Work> decoding_work(const OpView& op) {
  return {graph::Elementwise{num_entries(op), kCost}};
}

}  // namespace

extern const OpDef kCtcBeamSearch{
    .name = "ctc_beam_search",
    .schema =
        "ctc_beam_search(Tensor{floats} log_probs, Tensor{indices} lengths, *, "
        "int{0..} blank, int{1..} beam_width, int{1..} top_paths) -> "
        "(Tensor? probabilities, Tensor? path_lengths, Tensor? paths)",
    .family = "decode",
    .shape = decoded_types,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<CtcBeamSearch>(op);
    },
    .work = decoding_work,
};

}  // namespace popsim::ops
