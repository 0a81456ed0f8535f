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

// One input of the program. A micro-batch has several values of it if there are
// several replicas. Each action that reads the input asks for its value once.
class Source {
 public:
  virtual ~Source() = default;
  // A value for a micro-batch, counted from the start of the run. It does not
  // change or move while the micro-batch is in flight.
  [[nodiscard]] virtual void* micro_batch(int64_t index, int64_t which) = 0;
};

// A slice of a tensor that the caller passed, read in place.
class CallSlice final : public Source {
 public:
  // `bytes` is the size of one value; 0 if there is only one for all
  // micro-batches. Each has `count` of them.
  CallSlice(int64_t bytes, int64_t count) : bytes_(bytes), count_(count) {}

  // Call it before each run.
  void point_at(void* whole) { whole_ = static_cast<char*>(whole); }
  [[nodiscard]] void* micro_batch(int64_t index, int64_t which) override {
    return whole_ + (index * count_ + which) * bytes_;
  }

 private:
  int64_t bytes_;
  int64_t count_;
  char* whole_ = nullptr;
};

// The elements of an inlet that a run holds, `count` per micro-batch. One
// thread takes them; any thread reads and releases them.
class Feed {
 public:
  Feed(std::shared_ptr<Inlet> inlet, int64_t count)
      : inlet_(std::move(inlet)), count_(count) {}
  Feed(const Feed&) = delete;
  Feed& operator=(const Feed&) = delete;
  ~Feed() { end_run(); }

  // Call it before each run, with the micro-batch that the run begins with. If
  // elements are held, they are its first ones.
  void begin_run(ops::Patience* patience, int64_t first);
  // Releases all elements. Call it after each run that nobody continues.
  void end_run();
  // Takes the elements of a micro-batch, counted from the start of the run.
  // Throws Stopped if the run must end first, and FeedEnd.
  void take(int64_t index);
  // Whether all elements of a micro-batch are held.
  [[nodiscard]] bool holds(int64_t index);
  // The tensors of an element of a micro-batch.
  [[nodiscard]] std::span<void* const> element(int64_t index, int64_t which);
  // Releases the micro-batches before this one, which no action reads any more.
  void release_before(int64_t index);

 private:
  std::shared_ptr<Inlet> inlet_;
  int64_t count_;
  ops::Patience* patience_ = nullptr;
  std::mutex mutex_;   // for what follows
  int64_t first_ = 0;  // the oldest element that is held
  std::deque<std::span<void* const>> held_;
};

// A tensor of a feed's elements.
class FedTensor final : public Source {
 public:
  FedTensor(Feed& feed, size_t position) : feed_(feed), position_(position) {}

  [[nodiscard]] void* micro_batch(int64_t index, int64_t which) override {
    return feed_.element(index, which)[position_];
  }

 private:
  Feed& feed_;
  size_t position_;
};

}  // namespace popsim::runtime
