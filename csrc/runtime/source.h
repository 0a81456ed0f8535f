// Where the values of a program's inputs come from.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "base/check.h"
#include "ops/run_context.h"

namespace popsim::runtime {

// Thrown if there is no next element: the data has ended, or making an element
// has failed.
class FeedEnd : public UserError {
 public:
  using UserError::UserError;
};

// Gives elements to a program. All elements have the same number and types of
// tensors. One run at a time can use it.
class Inlet {
 public:
  virtual ~Inlet() = default;
  // The tensors of the next element, each contiguous and aligned to 64 bytes;
  // they stay in place until the element is released. Waits for the element as
  // long as `patience` lasts; the result is empty if it ends first. Throws
  // FeedEnd.
  [[nodiscard]] virtual std::span<void* const> acquire(
      ops::Patience& patience) = 0;
  // Gives the oldest acquired element back.
  virtual void release() = 0;
  // The bytes of each tensor of an element.
  [[nodiscard]] virtual std::vector<int64_t> sizes() const = 0;
  // The number of elements that can be acquired at a time.
  [[nodiscard]] virtual int64_t depth() const = 0;
};

// One input of the program. Each action that reads the input asks for its value
// once.
class Source {
 public:
  virtual ~Source() = default;
  // The value for a micro-batch, counted from the start of the run. The value
  // does not change or move while the micro-batch is in flight.
  [[nodiscard]] virtual void* micro_batch(int64_t index) = 0;
};

// A slice of a tensor that the caller passed, read in place.
class CallSlice final : public Source {
 public:
  // `bytes` is the size of one micro-batch; 0 if all micro-batches have the
  // same value.
  explicit CallSlice(int64_t bytes) : bytes_(bytes) {}

  // Call it before each run.
  void point_at(void* whole) { whole_ = static_cast<char*>(whole); }
  [[nodiscard]] void* micro_batch(int64_t index) override {
    return whole_ + index * bytes_;
  }

 private:
  int64_t bytes_;
  char* whole_ = nullptr;
};

// The elements of an inlet that a run holds, one per micro-batch. One thread
// takes them; any thread reads and releases them.
class Feed {
 public:
  explicit Feed(std::shared_ptr<Inlet> inlet) : inlet_(std::move(inlet)) {}

  // Call them before and after each run.
  void begin_run(ops::Patience* patience);
  void end_run();
  // The tensors of a micro-batch, counted from the start of the run. Throws
  // Stopped if the run must end first, and FeedEnd.
  [[nodiscard]] std::span<void* const> element(int64_t index);
  // Releases the micro-batches before this one, which no action reads any more.
  void release_before(int64_t index);

 private:
  std::shared_ptr<Inlet> inlet_;
  ops::Patience* patience_ = nullptr;
  std::mutex mutex_;   // for what follows
  int64_t first_ = 0;  // the oldest element that is held
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
