// Elements that the host prepares while programs run: a ring of slots. Programs
// read the slots in place.
#pragma once

#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "feeds/component.h"
#include "runtime/source.h"

namespace popsim::feeds {

struct InfeedStatistics {
  int64_t pushed = 0;
  int64_t taken = 0;
  int64_t waits = 0;  // how often a program waited for an element
  double seconds_waited = 0;
  double seconds_full = 0;  // how long the producer waited for a free slot
  int64_t ready = 0;        // elements that no program has taken yet
  int64_t depth = 0;        // slots
};

class Infeed final : public runtime::Inlet {
 public:
  Infeed(Components components, int64_t depth);

  [[nodiscard]] std::span<void* const> acquire(
      ops::Patience& patience) override;
  void release() override;
  [[nodiscard]] int64_t depth() const override;
  [[nodiscard]] std::vector<int64_t> sizes() const override {
    return sizes_of(components_);
  }

  // Waits for a free slot and copies an element into it. Returns false when the
  // time is over or the queue is closed. Throws UserError if the tensors have
  // other types. Only one thread at a time may call it.
  bool push(const std::vector<at::Tensor>& tensors, double seconds);
  // Says that no more elements come after those in the queue; the message says
  // why.
  void end(std::string message);
  // Drops the elements that no program has taken, and cancels end().
  void clear();
  // Ends all waits with an error; later calls fail too.
  void close();
  [[nodiscard]] bool closed() const;
  // Makes room for this number of elements, if the queue has less.
  void ensure_depth(int64_t slots);
  [[nodiscard]] InfeedStatistics statistics() const;

 private:
  struct Slot {
    at::Tensor memory;
    std::vector<void*> places;  // by component
  };
  using Lock = std::unique_lock<std::mutex>;

  [[nodiscard]] Slot make_slot() const;
  [[nodiscard]] bool is_full() const {
    return num_acquired_ + num_ready_ == std::ssize(slots_);
  }
  [[nodiscard]] Slot& slot(int64_t position) {
    return slots_[static_cast<size_t>((first_ + position) %
                                      std::ssize(slots_))];
  }
  void check(const std::vector<at::Tensor>& tensors) const;

  const Components components_;
  mutable std::mutex mutex_;
  std::condition_variable readable_;
  std::condition_variable writable_;
  std::vector<Slot> slots_;
  int64_t first_ = 0;         // the slot of the oldest element
  int64_t num_acquired_ = 0;  // elements that programs hold
  int64_t num_ready_ = 0;     // elements after them that are ready
  bool pushing_ = false;
  bool ended_ = false;
  bool closed_ = false;
  std::string end_message_;
  InfeedStatistics statistics_;
};

}  // namespace popsim::feeds
