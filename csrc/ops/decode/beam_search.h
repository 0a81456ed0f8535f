// The most likely sequences of labels, where each step of a sequence in time
// says how likely every label is, and a blank.
//
// A sequence of labels sums up all alignments that become it when repeated
// labels count once and blanks are taken out. Step by step, the search goes on
// with a number of sequences that are the most likely so far: the beam.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ops/decode/prefix_tree.h"

namespace popsim::ops::decode {

// What a search is for.
struct BeamSpec {
  int64_t steps = 0;  // at most
  int64_t classes = 0;
  int64_t blank = 0;
  int64_t width = 0;  // sequences in the beam

  // The most sequences that a search can meet.
  [[nodiscard]] int64_t num_sequences() const { return steps * width + 1; }
};

class BeamSearch {
 public:
  explicit BeamSearch(const BeamSpec& spec);
  // A copy would not have the memory that is reserved.
  BeamSearch(const BeamSearch&) = delete;
  BeamSearch& operator=(const BeamSearch&) = delete;
  BeamSearch(BeamSearch&&) = default;
  BeamSearch& operator=(BeamSearch&&) = default;
  ~BeamSearch() = default;

  // Begins with the sequence that has no label.
  void begin();
  // Goes on by a step. False where a log-probability is NaN or plus infinity:
  // then the search is over.
  [[nodiscard]] bool advance(const float* log_probs);

  // Sequences that are left, the most likely first; of those that are as
  // likely, the one first whose beginning was, then the one with fewer labels,
  // then the one with the smaller label.
  [[nodiscard]] int64_t size() const {
    return static_cast<int64_t>(beam_.size());
  }
  [[nodiscard]] double log_probability(int64_t i) const {
    return beam_[static_cast<size_t>(i)].total;
  }
  [[nodiscard]] int64_t length(int64_t i) const {
    return tree_.length(beam_[static_cast<size_t>(i)].sequence);
  }
  // Writes length(i) labels.
  void read(int64_t i, int64_t* labels) const;

 private:
  // A sequence, and the log-probability of its alignments that end in a blank
  // and in its last label.
  struct Entry {
    int32_t sequence;
    double blank;
    double label;
    double total;
  };
  // What an entry of the beam may become.
  struct Candidate {
    double total;
    double blank;
    int32_t entry;
    int32_t label;  // that is added, or kNone
    double last;    // log-probability of those that end in the last label
  };

  static bool comes_first(const Candidate& a, const Candidate& b);
  // The log-probability of all alignments of an entry that go on with `label`;
  // `log_prob` is the label's own.
  [[nodiscard]] double extended(const Entry& entry, int32_t label,
                                float log_prob) const;
  [[nodiscard]] bool rank_classes(const float* log_probs);
  void keep_entries(const float* log_probs);
  void extend_entries(const float* log_probs);
  void add(const Candidate& candidate);
  void leave_the_best();
  void take_candidates();

  BeamSpec spec_;
  size_t width_;
  size_t most_candidates_;
  PrefixTree tree_;
  std::vector<Entry> beam_;
  std::vector<Entry> next_;
  std::vector<Candidate> candidates_;
  // No candidate counts that is less likely.
  double threshold_ = 0.0;
  std::vector<int32_t> classes_;  // without the blank
  size_t num_ranked_;             // of them are in order, the likeliest first
};

}  // namespace popsim::ops::decode
