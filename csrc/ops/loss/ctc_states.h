// The log-probabilities of an item's states, step by step.
#pragma once

#include <array>
#include <span>
#include <vector>

#include "ops/loss/ctc_batch.h"

namespace popsim::ops::ctc {

// The log-probability of an impossible state. It is finite, so that sums and
// differences with it are numbers.
inline constexpr float kNever = -1e30f;
// Below the log-probability of every possible state.
inline constexpr float kHardlyEver = -1e29f;

class States {
 public:
  // For items that have no more states than this.
  States(int64_t most_states, int64_t blank);

  // Begins an item: no state can be.
  void begin(const Item& item);
  // Reads the log-probabilities of the states' classes at a step from those of
  // all classes.
  void emit(const float* log_probs);
  // Goes on by a step, from the states before or, back in time, behind.
  void advance();
  void go_back();
  // Adds what emit() has read, and subtracts the highest of the sums, so that
  // they keep their digits over any number of steps. Returns what it subtracts.
  float add_emissions();

  [[nodiscard]] int64_t count() const { return count_; }
  [[nodiscard]] float* values() { return rows_[0].data() + kMargin; }
  [[nodiscard]] const float* values() const {
    return rows_[0].data() + kMargin;
  }
  // Log-probability of the last two: that an alignment ends.
  [[nodiscard]] static double end(const float* states, int64_t count);

 private:
  // Cells on both sides of a row: neighbours of its first and last states.
  static constexpr int64_t kMargin = 2;

  int64_t blank_;
  int64_t count_ = 0;
  std::span<const int64_t> labels_;
  std::array<std::vector<float>, 2> rows_;  // now, and the step next to it
  // 0 for a state that follows the one two before, else kNever.
  std::vector<float> skips_;
  std::vector<float> emissions_;
};

}  // namespace popsim::ops::ctc
