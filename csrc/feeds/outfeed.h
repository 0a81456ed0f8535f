// Elements that programs enqueue, and that the host reads while the programs
// run.
//
// Elements are stored in chunks, with one array per component. A program writes
// an element where the reader reads it: a reader gets a view of a chunk, not a
// copy, unless the view would keep much memory for few elements. The first
// chunk has the queue's depth; if readers are slow, later chunks are larger.
// The queue uses chunks again when no reader holds them any more.
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

// What a program does when the queue is full.
enum class WhenFull : int8_t {
  kWait,        // wait for a reader
  kRaise,       // raise an error
  kDropOldest,  // drop the oldest element that is not read
  kDropNewest,  // drop the new element
  kSpill,       // write elements to disk
};

struct OutfeedStatistics {
  int64_t enqueued = 0;
  int64_t dequeued = 0;
  int64_t bytes = 0;  // of the elements in memory that are not read yet
  int64_t peak_bytes = 0;
  int64_t dropped = 0;  // elements that no reader can read any more
  int64_t spilled = 0;  // elements that went to disk
  int64_t waits = 0;    // how often a program waited for a reader
  double seconds_waited = 0;
  int64_t ready = 0;  // elements that no reader has taken yet
};

struct OutfeedConfig {
  Components components;
  bool last = false;       // keep only the newest element
  int64_t every = 1;       // keep one of this many elements
  int64_t depth = 1;       // elements that fit without more memory
  int64_t max_bytes = -1;  // limit for elements not read yet; -1: none
  WhenFull when_full = WhenFull::kWait;
  // How long a program waits if there is no reader (seconds; may be infinite).
  double patience = std::numeric_limits<double>::infinity();
  std::string spill_folder = {};
  std::string name = {};  // for messages: where the queue is fed, and with what
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

  // Removes up to `most` of the oldest elements (-1: all). Returns their number
  // and one tensor [count, *shape] per component. A queue that keeps only the
  // newest element returns that element without the first axis, and keeps it.
  [[nodiscard]] std::pair<int64_t, std::vector<at::Tensor>> take(int64_t most);
  // Removes the oldest element (or copies the newest one) and returns its
  // tensors without a first axis. The list is empty if there is no element.
  [[nodiscard]] std::vector<at::Tensor> take_one();
  // Waits until there is an element, until wake() or close() is called, or
  // until the time is over. Returns whether there is an element.
  bool wait(double seconds);
  // Ends all current waits.
  void wake();
  // After it, enqueueing is an error; the elements in the queue can still be
  // read.
  void close();
  [[nodiscard]] OutfeedStatistics statistics() const;

 private:
  struct Chunk {
    int64_t capacity = 0;
    std::vector<at::Tensor> arrays;  // [capacity, *shape] by component
    int64_t num_written = 0;
    int64_t num_taken = 0;
    bool on_disk = false;
    bool closed = false;  // no more elements are written to it

    [[nodiscard]] bool is_full() const {
      return closed || num_written == capacity;
    }
    [[nodiscard]] int64_t num_left() const { return num_written - num_taken; }
  };
  // Elements of one chunk that a reader takes together.
  struct Piece {
    std::vector<at::Tensor> arrays;  // [count, *shape] by component
    int64_t count = 0;
    bool movable = false;  // the piece is a whole chunk in memory
  };
  using Lock = std::unique_lock<std::mutex>;

  // Returns whether the run continues; throws if no reader reads for too long.
  [[nodiscard]] bool wait_for_room(Lock& lock, ops::Patience& patience);
  [[nodiscard]] bool has_room() const;
  // Throws the error of a full queue; `why` follows the words "is full".
  [[noreturn]] void raise_full(const std::string& why) const;
  // Whether a program must wait or fail now.
  [[nodiscard]] bool stops_programs() const;
  // The chunk that the next element is written to.
  [[nodiscard]] const Chunk& writable_chunk(bool on_disk);
  // Removes elements from the oldest chunk.
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
  std::deque<std::unique_ptr<Chunk>> chunks_;  // the oldest chunk first
  std::vector<std::unique_ptr<Chunk>> spare_;
  std::vector<void*> places_;  // of the element that a program is writing
  std::vector<at::Tensor> newest_;
  std::vector<at::Tensor> next_;
  int64_t num_offered_ = 0;  // elements that programs offered
  int64_t num_waiting_ = 0;  // elements in the queue
  int64_t num_on_disk_ = 0;  // elements of these that are on disk
  int64_t num_woken_ = 0;    // number of calls of wake()
  bool writing_ = false;
  bool closed_ = false;
  OutfeedStatistics statistics_;
};

}  // namespace popsim::feeds
