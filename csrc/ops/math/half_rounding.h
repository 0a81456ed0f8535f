// Rounding to float16 up or down at random: down or up with the probabilities
// that leave the number as it is on average.
#pragma once

#include <cstdint>

#include "ops/run_context.h"

namespace popsim::ops {

class HalfRounding {
 public:
  // Elements whose random bits are drawn together.
  static constexpr int64_t kGroup = 128;

  // `stream`: 31 bits, of its own for every tensor that is rounded. Tensors
  // that are drawn (random.cpp) have other streams.
  explicit HalfRounding(int64_t stream);

  // Rounds elements [first, first + count) of the tensor, in place, to numbers
  // that float16 has: a neighbour above or below. What is one already, or not
  // finite, stays as it is; beyond the largest finite number of float16 it is
  // rounded to nearest, so from 65520 on to infinity. An element's bits depend
  // on the seed, the stream, the micro-batch and its position.
  void round(const RunContext& context, int64_t first, int64_t count,
             float* values) const;

 private:
  uint32_t stream_;
};

}  // namespace popsim::ops
