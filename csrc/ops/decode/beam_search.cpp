#include "ops/decode/beam_search.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace popsim::ops::decode {
namespace {

constexpr int32_t kNone = PrefixTree::kNone;
constexpr double kNever = -std::numeric_limits<double>::infinity();

// The logarithm of exp(a) + exp(b); neither may be plus infinity.
double log_sum(double a, double b) {
  if (a < b) std::swap(a, b);
  return b == kNever ? a : a + std::log1p(std::exp(b - a));
}

}  // namespace

BeamSearch::BeamSearch(const BeamSpec& spec)
    : spec_(spec),
      width_(static_cast<size_t>(spec.width)),
      // This number of candidates is collected before the best ones are chosen.
      most_candidates_(2 * width_ + 64),
      tree_(spec.num_sequences()) {
  beam_.reserve(width_);
  next_.reserve(width_);
  candidates_.reserve(most_candidates_);
  classes_.reserve(static_cast<size_t>(spec.classes));
  for (int64_t c = 0; c < spec.classes; ++c) {
    if (c != spec.blank) classes_.push_back(static_cast<int32_t>(c));
  }
  // Any label may extend a sequence. Some of the extended sequences are in the
  // beam already, and one repeats its last label; among the best sequences
  // there are at most as many others as the beam holds.
  num_ranked_ = std::min(classes_.size(), 2 * width_ + 1);
}

void BeamSearch::begin() {
  tree_.clear();
  tree_.set_place(PrefixTree::kRoot, 0);
  beam_.assign(1, {PrefixTree::kRoot, 0.0, kNever, 0.0});
}

bool BeamSearch::advance(const float* log_probs) {
  if (!rank_classes(log_probs)) {
    beam_.clear();
    return false;
  }
  candidates_.clear();
  threshold_ = std::numeric_limits<double>::lowest();
  keep_entries(log_probs);
  extend_entries(log_probs);
  leave_the_best();
  std::sort(candidates_.begin(), candidates_.end(), comes_first);
  take_candidates();
  return true;
}

void BeamSearch::read(int64_t i, int64_t* labels) const {
  int32_t sequence = beam_[static_cast<size_t>(i)].sequence;
  for (int32_t k = tree_.length(sequence); k > 0; --k) {
    labels[k - 1] = tree_.label(sequence);
    sequence = tree_.parent(sequence);
  }
}

bool BeamSearch::comes_first(const Candidate& a, const Candidate& b) {
  if (a.total != b.total) return a.total > b.total;
  return a.entry != b.entry ? a.entry < b.entry : a.label < b.label;
}

double BeamSearch::extended(const Entry& entry, int32_t label,
                            float log_prob) const {
  // A label that repeats the one before it starts a new label only after a
  // blank.
  const bool repeats = tree_.label(entry.sequence) == label;
  return (repeats ? entry.blank : entry.total) + log_prob;
}

bool BeamSearch::rank_classes(const float* log_probs) {
  for (int64_t c = 0; c < spec_.classes; ++c) {
    if (!(log_probs[c] < std::numeric_limits<float>::infinity())) return false;
  }
  const auto is_likelier = [&](int32_t a, int32_t b) {
    return log_probs[a] != log_probs[b] ? log_probs[a] > log_probs[b] : a < b;
  };
  std::partial_sort(classes_.begin(),
                    classes_.begin() + static_cast<ptrdiff_t>(num_ranked_),
                    classes_.end(), is_likelier);
  return true;
}

// The sequences that are not extended in this step. Their alignments get a
// blank or the last label again. If the beam also has the sequence without the
// last label, this adds the extension of that sequence by the last label.
void BeamSearch::keep_entries(const float* log_probs) {
  for (size_t i = 0; i < beam_.size(); ++i) {
    const Entry& entry = beam_[i];
    const double blank = entry.total + log_probs[spec_.blank];
    double last = kNever;
    if (entry.sequence != PrefixTree::kRoot) {
      const int32_t label = tree_.label(entry.sequence);
      last = entry.label + log_probs[label];
      const int32_t place = tree_.place(tree_.parent(entry.sequence));
      if (place != kNone) {
        const Entry& beginning = beam_[static_cast<size_t>(place)];
        last = log_sum(last, extended(beginning, label, log_probs[label]));
      }
    }
    add({log_sum(blank, last), blank, static_cast<int32_t>(i), kNone, last});
  }
}

void BeamSearch::extend_entries(const float* log_probs) {
  for (size_t i = 0; i < beam_.size(); ++i) {
    const Entry& entry = beam_[i];
    for (size_t k = 0; k < num_ranked_; ++k) {
      const int32_t label = classes_[k];
      if (entry.total + log_probs[label] < threshold_) break;
      const double total = extended(entry, label, log_probs[label]);
      if (total < threshold_) continue;
      const int32_t longer = tree_.find(entry.sequence, label);
      if (longer != kNone && tree_.place(longer) != kNone) continue;
      add({total, kNever, static_cast<int32_t>(i), label, total});
    }
  }
}

void BeamSearch::add(const Candidate& candidate) {
  if (candidate.total < threshold_) return;  // also drops impossible candidates
  if (candidates_.size() == most_candidates_) leave_the_best();
  candidates_.push_back(candidate);
}

void BeamSearch::leave_the_best() {
  if (candidates_.size() <= width_) return;
  const auto last = candidates_.begin() + static_cast<ptrdiff_t>(width_) - 1;
  std::nth_element(candidates_.begin(), last, candidates_.end(), comes_first);
  threshold_ = last->total;
  candidates_.resize(width_);
}

void BeamSearch::take_candidates() {
  for (const Entry& entry : beam_) tree_.set_place(entry.sequence, kNone);
  next_.clear();
  for (const Candidate& candidate : candidates_) {
    int32_t sequence = beam_[static_cast<size_t>(candidate.entry)].sequence;
    if (candidate.label != kNone) {
      sequence = tree_.find_or_add(sequence, candidate.label);
    }
    tree_.set_place(sequence, static_cast<int32_t>(next_.size()));
    next_.push_back(
        {sequence, candidate.blank, candidate.last, candidate.total});
  }
  std::swap(beam_, next_);
}

}  // namespace popsim::ops::decode
