// Where the values of a program's inputs come from.
#pragma once

#include <cstdint>
#include <span>

#include "base/check.h"
#include "ops/run_context.h"

namespace popsim::runtime {

// There is no next element: the data has ended, or making it has failed.
class FeedEnd : public UserError {
 public:
  using UserError::UserError;
};

// Hands elements to a program: some tensors each, always of the same types.
// Used by one run at a time.
class Inlet {
 public:
  virtual ~Inlet() = default;
  // The tensors of the next element, each contiguous and aligned to 64 bytes;
  // they stay there until the element is released. Waits for it as long as
  // patience lasts and is empty when that ends. Throws FeedEnd.
  [[nodiscard]] virtual std::span<void* const> acquire(
      ops::Patience& patience) = 0;
  // Gives the oldest element that is acquired back.
  virtual void release() = 0;
  // How many elements can be acquired at a time.
  [[nodiscard]] virtual int64_t depth() const = 0;
};

// One input of the program. Asked once per action.
class Source {
 public:
  virtual ~Source() = default;
  // The value for a micro-batch, counted from the start of the run. It stays
  // there, unchanged, as long as the micro-batch is in flight.
  [[nodiscard]] virtual void* micro_batch(int64_t index) = 0;
};

// A part of a tensor that the caller gave, which is read where it is.
class CallSlice final : public Source {
 public:
  explicit CallSlice(int64_t bytes) : bytes_(bytes) {}

  // To be called before each run.
  void point_at(void* whole) { whole_ = static_cast<char*>(whole); }
  [[nodiscard]] void* micro_batch(int64_t index) override {
    return whole_ + index * bytes_;
  }

 private:
  int64_t bytes_;  // of one micro-batch
  char* whole_ = nullptr;
};

}  // namespace popsim::runtime
