// The exchange of gradients between the processes that train a model together.
#pragma once

#include <span>

namespace popsim::ops {

class Exchange {
 public:
  virtual ~Exchange() = default;
  // The numbers that sum() adds up; the caller fills them.
  [[nodiscard]] virtual std::span<float> numbers() = 0;
  // Replaces each number by its sum over all processes, the same bits in each
  // of them. Throws HostFailure (host_code.h) if another process does not take
  // part.
  virtual void sum() = 0;
};

}  // namespace popsim::ops
