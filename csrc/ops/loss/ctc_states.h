// The log-probabilities of an item's states, step by step.
#pragma once

#include <array>
#include <span>
#include <vector>

#include "ops/loss/ctc_batch.h"

namespace popsim::ops::ctc {

// Stands for the log-probability of an impossible state. It is finite, so sums
// and differences with it are numbers.
inline constexpr float kNever = -1e30f;
// Less than the log-probability of every possible state.
inline constexpr float kHardlyEver = -1e29f;

class States {
 public:
  // For items with at most this number of states.
  States(int64_t most_states, int64_t blank);

  // Begins an item; no state is possible yet.
  void begin(const Item& item);
  // Reads the log-probabilities at a step: those of the states' classes, from
  // those of all classes.
  void emit(const float* log_probs);
  // Goes to the next step, forward or backward in time.
  void advance();
  void go_back();
  // Adds the values that emit() has read, and subtracts the highest sum, so
  // that the values stay precise over any number of steps. Returns the value
  // that it subtracted.
  float add_emissions();

  [[nodiscard]] int64_t count() const { return count_; }
  [[nodiscard]] float* values() { return rows_[0].data() + kMargin; }
  [[nodiscard]] const float* values() const {
    return rows_[0].data() + kMargin;
  }
  // The log-probability of the last two states: that an alignment ends.
  [[nodiscard]] static double end(const float* states, int64_t count);

 private:
  // Extra cells on both sides of a row, as neighbours of its first and last
  // states.
  static constexpr int64_t kMargin = 2;

  int64_t blank_;
  int64_t count_ = 0;
  std::span<const int64_t> labels_;
  // The rows of the current step and of the adjacent one.
  std::array<std::vector<float>, 2> rows_;
  // 0 for a state that may follow the second state before it, else kNever.
  std::vector<float> skips_;
  std::vector<float> emissions_;
};

}  // namespace popsim::ops::ctc
