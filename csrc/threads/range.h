// A range of units of work.
#pragma once

#include <cstdint>

namespace popsim::threads {

struct Range {
  int64_t begin = 0;
  int64_t end = 0;

  [[nodiscard]] int64_t size() const { return end - begin; }
};

// One of `count` parts of [0, units) of about the same length.
[[nodiscard]] constexpr Range part(int64_t units, int64_t index,
                                   int64_t count) {
  return {units * index / count, units * (index + 1) / count};
}

}  // namespace popsim::threads
