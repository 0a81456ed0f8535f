// The memory of a returned tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include "base/check.h"
#include "ops/run_context.h"

namespace popsim::runtime {

// A sink whose entries follow one another in one tensor.
class Buffer final : public ops::Sink {
 public:
  // Call it before each run.
  void point_at(const at::Tensor& tensor) {
    start_ = static_cast<char*>(tensor.data_ptr());
    bytes_ = static_cast<int64_t>(tensor.nbytes());
  }

  [[nodiscard]] void* entry(int64_t index, int64_t bytes) override {
    check_internal(index >= 0 && (index + 1) * bytes <= bytes_,
                   "return: entry ", index, " of ", bytes,
                   " bytes is outside a buffer of ", bytes_, " bytes");
    return start_ + index * bytes;
  }

 private:
  char* start_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace popsim::runtime
