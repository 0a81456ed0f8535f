// Rounding to float16 up or down at random. The probabilities are such that the
// expected value is the number itself.
#pragma once

#include <cstdint>

#include "ops/run_context.h"

namespace popsim::ops {

class HalfRounding {
 public:
  // Number of elements whose random bits are drawn together.
  static constexpr int64_t kGroup = 128;

  // `stream`: 31 bits; each tensor that is rounded has its own. Random tensors
  // (random.cpp) have other streams.
  explicit HalfRounding(int64_t stream);

  // Rounds elements [first, first + count) of the tensor in place to float16
  // numbers: the next one above or below. Numbers that float16 has, and those
  // that are not finite, stay unchanged. Numbers beyond the largest finite
  // float16 are rounded to nearest, so those from 65520 on become infinity. The
  // random bits of an element depend on the seed, the stream, the micro-batch
  // and the element's position.
  void round(const RunContext& context, int64_t first, int64_t count,
             float* values) const;

 private:
  uint32_t stream_;
};

}  // namespace popsim::ops
