// Counts values by the upper bits of float32: sign, exponent, and the first
// bits of the mantissa.
#pragma once

#include <cstdint>
#include <vector>

namespace popsim::ops::observe {

// The counts of one task. Neighbouring values are counted in different copies
// of the bins: a count that was just written takes some cycles to be read.
class Bins {
 public:
  // `num_values`: about how many values are counted.
  Bins(int64_t mantissa_bits, int64_t num_values);

  void clear();
  void add(const float* values, int64_t count);
  // Adds up the copies; no more values come.
  void fold();
  // Adds the counts, after fold().
  void add_to(double* negative, double* positive) const;

 private:
  int64_t mantissa_bits_;
  int64_t num_copies_;
  std::vector<uint32_t> counts_;  // the bins of one copy after the other
};

}  // namespace popsim::ops::observe
