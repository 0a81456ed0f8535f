// Where the values of a program's inputs come from.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <utility>
#include <vector>

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
  // Bytes of each tensor of an element.
  [[nodiscard]] virtual std::vector<int64_t> sizes() const = 0;
  // How many elements can be acquired at a time.
  [[nodiscard]] virtual int64_t depth() const = 0;
};

// One input of the program. Asked once by each action that reads it.
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
  // `bytes` of one micro-batch; 0 where all of them have the same value.
  explicit CallSlice(int64_t bytes) : bytes_(bytes) {}

  // To be called before each run.
  void point_at(void* whole) { whole_ = static_cast<char*>(whole); }
  [[nodiscard]] void* micro_batch(int64_t index) override {
    return whole_ + index * bytes_;
  }

 private:
  int64_t bytes_;
  char* whole_ = nullptr;
};

// The elements of an inlet that a run holds, one per micro-batch.
class Feed {
 public:
  explicit Feed(std::shared_ptr<Inlet> inlet) : inlet_(std::move(inlet)) {}

  // To be called before each run, and when it is over.
  void begin_run(ops::Patience* patience);
  void end_run();
  // The tensors of a micro-batch, counted from the start of the run. Throws
  // Stopped where the run is to end first, and FeedEnd.
  [[nodiscard]] std::span<void* const> element(int64_t index);
  // Nobody reads the micro-batches before this one any more.
  void release_before(int64_t index);

 private:
  std::shared_ptr<Inlet> inlet_;
  ops::Patience* patience_ = nullptr;
  int64_t first_ = 0;  // the oldest that is held
  std::deque<std::span<void* const>> held_;
};

// A tensor of a feed's elements.
class FedTensor final : public Source {
 public:
  FedTensor(Feed& feed, size_t position) : feed_(feed), position_(position) {}

  [[nodiscard]] void* micro_batch(int64_t index) override {
    return feed_.element(index)[position_];
  }

 private:
  Feed& feed_;
  size_t position_;
};

}  // namespace popsim::runtime
