// Elements that programs enqueue and the host reads while they run.
//
// Elements lie in chunks, one array per component, and are written where they
// stay until they are read: what is read is a part of a chunk, not a copy,
// unless that would keep much memory for little. The first chunk has the
// queue's depth; where readers lag, further ones hold more. Chunks that nobody
// holds any more are used again.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <limits>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "feeds/component.h"
#include "ops/run_context.h"

namespace popsim::feeds {

// What happens to a program that finds a queue full.
enum class WhenFull : int8_t {
  kWait,        // for a reader
  kRaise,       // an error
  kDropOldest,  // of what nobody has read
  kDropNewest,  // what it would enqueue
  kSpill,       // elements go to disk
};

struct OutfeedStatistics {
  int64_t enqueued = 0;
  int64_t dequeued = 0;
  int64_t bytes = 0;  // of the elements in memory that nobody has read
  int64_t peak_bytes = 0;
  int64_t dropped = 0;  // that nobody can read any more
  int64_t spilled = 0;  // that went to disk
  int64_t waits = 0;    // of programs, for a reader
  double seconds_waited = 0;
};

struct OutfeedConfig {
  Components components;
  bool last = false;       // keep the newest element only
  int64_t every = 1;       // take one of so many elements
  int64_t depth = 1;       // elements that fit without further memory
  int64_t max_bytes = -1;  // of elements that nobody has read; -1: any number
  WhenFull when_full = WhenFull::kWait;
  // How long a program waits while nobody reads (seconds; may be infinite).
  double patience = std::numeric_limits<double>::infinity();
  std::string spill_folder = {};
  std::string name = {};  // for messages: where it is fed, and of what
};

class Outfeed final : public ops::Outlet {
 public:
  explicit Outfeed(OutfeedConfig config);

  [[nodiscard]] std::span<void* const> begin_element(
      ops::Patience& patience) override;
  void end_element() override;
  [[nodiscard]] std::vector<int64_t> sizes() const override {
    return sizes_of(config_.components);
  }

  // Removes up to `most` of the oldest elements (-1: all) and returns their
  // count and a tensor [count, *shape] per component. A queue that keeps only
  // the newest element returns that one, without the first axis, and keeps it.
  [[nodiscard]] std::pair<int64_t, std::vector<at::Tensor>> take(int64_t most);
  // Removes the oldest element (or copies the newest) and returns its tensors,
  // without a first axis; none if there is no element.
  [[nodiscard]] std::vector<at::Tensor> take_one();
  // Waits until there is an element, or wake() or close(), or time is up.
  // Returns whether there is one.
  bool wait(double seconds);
  // Ends all waits that go on now.
  void wake();
  // From now on enqueueing is an error; elements in the queue can be read.
  void close();
  [[nodiscard]] OutfeedStatistics statistics() const;

 private:
  struct Chunk {
    int64_t capacity = 0;
    std::vector<at::Tensor> arrays;  // [capacity, *shape] by component
    int64_t num_written = 0;
    int64_t num_taken = 0;
    bool on_disk = false;
    bool closed = false;  // no more is written to it

    [[nodiscard]] bool is_full() const {
      return closed || num_written == capacity;
    }
    [[nodiscard]] int64_t num_left() const { return num_written - num_taken; }
  };
  // Elements of one chunk that are taken together.
  struct Piece {
    std::vector<at::Tensor> arrays;  // [count, *shape] by component
    int64_t count = 0;
    bool movable = false;  // all that a chunk in memory can hold
  };
  using Lock = std::unique_lock<std::mutex>;

  // Returns whether the run is to go on; throws when nobody reads for too long.
  [[nodiscard]] bool wait_for_room(Lock& lock, ops::Patience& patience);
  [[nodiscard]] bool has_room() const;
  // Ends a program that finds no room; `why` follows "is full".
  [[noreturn]] void raise_full(const std::string& why) const;
  // Whether a program has to wait, or to fail.
  [[nodiscard]] bool stops_programs() const;
  // The chunk that the next element goes to.
  [[nodiscard]] const Chunk& writable_chunk(bool on_disk);
  // Elements leave the oldest chunk.
  void advance(int64_t count);
  [[nodiscard]] std::unique_ptr<Chunk> make_chunk_on_disk() const;
  [[nodiscard]] std::unique_ptr<Chunk> make_chunk();
  void reuse(std::unique_ptr<Chunk> chunk);
  [[nodiscard]] std::vector<at::Tensor> empty_arrays(int64_t count) const;
  [[nodiscard]] std::vector<Piece> take_pieces(int64_t count);
  [[nodiscard]] std::vector<at::Tensor> join_pieces(
      const std::vector<Piece>& pieces) const;

  const OutfeedConfig config_;
  const int64_t element_bytes_;
  mutable std::mutex mutex_;
  std::condition_variable readable_;
  std::condition_variable writable_;
  std::deque<std::unique_ptr<Chunk>> chunks_;  // the oldest first
  std::vector<std::unique_ptr<Chunk>> spare_;
  std::vector<void*> places_;  // of the element that is being written
  std::vector<at::Tensor> newest_;
  std::vector<at::Tensor> next_;
  int64_t num_offered_ = 0;  // elements
  int64_t num_waiting_ = 0;  // of those taken
  int64_t num_on_disk_ = 0;  // of these
  int64_t num_woken_ = 0;    // calls of wake()
  bool writing_ = false;
  bool closed_ = false;
  OutfeedStatistics statistics_;
};

}  // namespace popsim::feeds
