#include "ops/loss/ctc_states.h"

#include <algorithm>
#include <cmath>

#include "ops/math/vec_math.h"
#include "ops/operands/rows.h"

namespace popsim::ops::ctc {
namespace {

// An alignment comes from the same state, from the state next to it, or from
// the second one on that side if it may skip the first one. kSide: -1 or 1.
template <int64_t kSide>
void advance_from(const float* states, const float* skips, float* out,
                  int64_t count) {
  for_each_vector(count, [&](int64_t i, auto n) {
    const Vec same = load(states + i, n);
    const Vec beside = load(states + i + kSide, n);
    const Vec second = load(states + i + 2 * kSide, n) + load(skips + i, n);
    const Vec highest = larger(larger(same, beside), second);
    const Vec sum =
        exp(same - highest) + exp(beside - highest) + exp(second - highest);
    store(highest + log(sum), out + i, n);
  });
}

}  // namespace

States::States(int64_t most_states, int64_t blank) : blank_(blank) {
  const auto cells = static_cast<size_t>(padded(most_states + 2 * kMargin));
  for (std::vector<float>& row : rows_) row.resize(cells);
  skips_.resize(cells);
  emissions_.resize(cells);
}

void States::begin(const Item& item) {
  labels_ = item.labels;
  count_ = item.states();
  for (std::vector<float>* row : {&rows_[0], &rows_[1], &skips_}) {
    std::fill_n(row->begin(), count_ + 2 * kMargin, kNever);
  }
  for (size_t i = 1; i < labels_.size(); ++i) {
    if (labels_[i] != labels_[i - 1]) skips_[2 * i + 1] = 0.0f;
  }
}

void States::emit(const float* log_probs) {
  // This is not std::max, which would lose a NaN.
  const auto at_least = [](float x) { return x < kNever ? kNever : x; };
  const float blank = at_least(log_probs[blank_]);
  for (size_t i = 0; i < labels_.size(); ++i) {
    emissions_[2 * i] = blank;
    emissions_[2 * i + 1] = at_least(log_probs[labels_[i]]);
  }
  emissions_[2 * labels_.size()] = blank;
}

void States::advance() {
  rows_[0].swap(rows_[1]);
  advance_from<-1>(rows_[1].data() + kMargin, skips_.data(), values(), count_);
}

void States::go_back() {
  rows_[0].swap(rows_[1]);
  advance_from<1>(rows_[1].data() + kMargin, skips_.data() + kMargin, values(),
                  count_);
}

float States::add_emissions() {
  float* states = values();
  Vec highest(kNever);
  for_each_vector(count_, [&](int64_t i, auto n) {
    const Vec sum = load(states + i, n) + load(emissions_.data() + i, n);
    store(sum, states + i, n);
    highest = larger(highest, keep(sum, Vec(kNever), n));
  });
  const float shift = max_across(highest);
  if (!(shift > kHardlyEver)) return 0.0f;
  for_each_vector(count_, [&](int64_t i, auto n) {
    store(load(states + i, n) - Vec(shift), states + i, n);
  });
  return shift;
}

double States::end(const float* states, int64_t count) {
  const double last = states[count - 1];
  if (count == 1) return last;
  const double other = states[count - 2];
  const double highest = std::max(last, other);
  return highest +
         std::log(std::exp(last - highest) + std::exp(other - highest));
}

}  // namespace popsim::ops::ctc
