// Finds the most likely sequences of labels. Each time step gives the
// probability of every label and of a blank.
//
// The probability of a label sequence is the sum over all alignments that give
// this sequence when repeated labels are merged and blanks are removed. In each
// step, the search continues with the most likely sequences so far: the beam.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ops/decode/prefix_tree.h"

namespace popsim::ops::decode {

// The settings of a search.
struct BeamSpec {
  int64_t steps = 0;  // the maximum
  int64_t classes = 0;
  int64_t blank = 0;
  int64_t width = 0;  // sequences in the beam

  // The largest number of sequences that a search can visit.
  [[nodiscard]] int64_t num_sequences() const { return steps * width + 1; }
};

class BeamSearch {
 public:
  explicit BeamSearch(const BeamSpec& spec);
  // A copy would not have the reserved memory.
  BeamSearch(const BeamSearch&) = delete;
  BeamSearch& operator=(const BeamSearch&) = delete;
  BeamSearch(BeamSearch&&) = default;
  BeamSearch& operator=(BeamSearch&&) = default;
  ~BeamSearch() = default;

  // Starts with the sequence without labels.
  void begin();
  // Continues with the next step. Returns false if a log-probability is NaN or
  // plus infinity: then the search is over.
  [[nodiscard]] bool advance(const float* log_probs);

  // The sequences that are left, the most likely one first. Among equally
  // likely ones, the order is that of their beginnings; then the one with fewer
  // labels is first, then the one with the smaller label.
  [[nodiscard]] int64_t size() const {
    return static_cast<int64_t>(beam_.size());
  }
  [[nodiscard]] double log_probability(int64_t i) const {
    return beam_[static_cast<size_t>(i)].total;
  }
  [[nodiscard]] int64_t length(int64_t i) const {
    return tree_.length(beam_[static_cast<size_t>(i)].sequence);
  }
  // Writes the length(i) labels of sequence i.
  void read(int64_t i, int64_t* labels) const;

 private:
  // A sequence, with the log-probability of its alignments that end in a blank
  // and of those that end in its last label.
  struct Entry {
    int32_t sequence;
    double blank;
    double label;
    double total;
  };
  // A sequence that an entry of the beam may become.
  struct Candidate {
    double total;
    double blank;
    int32_t entry;
    int32_t label;  // the label that is added, or kNone
    // The log-probability of the alignments that end in the last label.
    double last;
  };

  static bool comes_first(const Candidate& a, const Candidate& b);
  // The log-probability of all alignments of an entry that continue with
  // `label`; `log_prob` is the log-probability of the label itself.
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
  // Candidates that are less likely are dropped.
  double threshold_ = 0.0;
  std::vector<int32_t> classes_;  // all classes but the blank
  // The number of classes that are sorted, the likeliest first.
  size_t num_ranked_;
};

}  // namespace popsim::ops::decode
