#include "feeds/outfeed.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>

#include "base/check.h"
#include "feeds/spill.h"
#include "ops/operands/aten_types.h"

namespace popsim::feeds {
namespace {

using Clock = std::chrono::steady_clock;

// The size of a chunk after the first one, if it holds several elements.
constexpr int64_t kChunkBytes = int64_t{1} << 20;
constexpr int64_t kMaxElements = int64_t{1} << 16;
// The same for a chunk in a file.
constexpr int64_t kFileBytes = int64_t{1} << 26;
// A reader gets a copy of the elements if they are smaller than this.
constexpr int64_t kCopiedBytes = int64_t{1} << 16;
constexpr size_t kMaxSpare = 4;
constexpr std::chrono::milliseconds kBetweenLooks{20};

bool held_by_nobody(const std::vector<at::Tensor>& arrays) {
  return std::ranges::all_of(arrays, [](const at::Tensor& array) {
    return array.storage().use_count() == 1;
  });
}

}  // namespace

Outfeed::Outfeed(OutfeedConfig config)
    : config_(std::move(config)),
      element_bytes_(bytes_of(config_.components)),
      places_(config_.components.size()) {
  check_user(config_.depth > 0 && config_.every > 0,
             "a queue: depth and every must be at least 1, got depth ",
             config_.depth, " and every ", config_.every);
  if (config_.last) {
    next_ = empty_arrays(1);
    newest_ = empty_arrays(1);
  } else {
    chunks_.push_back(make_chunk());
  }
}

std::vector<at::Tensor> Outfeed::empty_arrays(int64_t count) const {
  // Readers may use the tensors in any way, so they are not inference tensors.
  const c10::InferenceMode off(false);
  std::vector<at::Tensor> arrays;
  for (const Component& component : config_.components) {
    Shape shape = component.shape;
    shape.insert(shape.begin(), count);
    arrays.push_back(at::empty(shape, ops::to_scalar_type(component.dtype)));
  }
  return arrays;
}

std::unique_ptr<Outfeed::Chunk> Outfeed::make_chunk() {
  auto largest = spare_.end();
  for (auto it = spare_.begin(); it != spare_.end(); ++it) {
    const bool is_larger =
        largest == spare_.end() || (*largest)->capacity < (*it)->capacity;
    if (is_larger && held_by_nobody((*it)->arrays)) largest = it;
  }
  if (largest != spare_.end()) {
    std::unique_ptr<Chunk> chunk = std::move(*largest);
    spare_.erase(largest);
    return chunk;
  }
  auto chunk = std::make_unique<Chunk>();
  const int64_t many = kChunkBytes / std::max<int64_t>(element_bytes_, 16);
  // The first chunk is allocated together with the queue.
  chunk->capacity = chunks_.empty() && statistics_.enqueued == 0
                        ? config_.depth
                        : std::max<int64_t>(1, std::min(many, kMaxElements));
  chunk->arrays = empty_arrays(chunk->capacity);
  return chunk;
}

std::unique_ptr<Outfeed::Chunk> Outfeed::make_chunk_on_disk() const {
  auto chunk = std::make_unique<Chunk>();
  chunk->on_disk = true;
  chunk->capacity =
      std::max<int64_t>(1, kFileBytes / std::max<int64_t>(element_bytes_, 16));
  for (const Component& component : config_.components) {
    Shape shape = component.shape;
    shape.insert(shape.begin(), chunk->capacity);
    chunk->arrays.push_back(
        tensor_on_disk(config_.spill_folder, shape, component.dtype));
  }
  return chunk;
}

void Outfeed::reuse(std::unique_ptr<Chunk> chunk) {
  if (chunk->on_disk) return;
  chunk->num_written = 0;
  chunk->num_taken = 0;
  chunk->closed = false;
  if (spare_.size() == kMaxSpare) spare_.erase(spare_.begin());
  spare_.push_back(std::move(chunk));
}

bool Outfeed::has_room() const {
  const int64_t num_in_memory = num_waiting_ - num_on_disk_;
  return config_.last || config_.max_bytes < 0 || num_in_memory == 0 ||
         (num_in_memory + 1) * element_bytes_ <= config_.max_bytes;
}

bool Outfeed::stops_programs() const {
  return !closed_ && !has_room() &&
         (config_.when_full == WhenFull::kWait ||
          config_.when_full == WhenFull::kRaise);
}

const Outfeed::Chunk& Outfeed::writable_chunk(bool on_disk) {
  if (!chunks_.empty() && chunks_.back()->on_disk != on_disk) {
    chunks_.back()->closed = true;
    if (chunks_.back()->num_left() == 0) {
      reuse(std::move(chunks_.back()));
      chunks_.pop_back();
    }
  }
  if (chunks_.empty() || chunks_.back()->is_full()) {
    chunks_.push_back(on_disk ? make_chunk_on_disk() : make_chunk());
  }
  return *chunks_.back();
}

void Outfeed::advance(int64_t count) {
  Chunk& chunk = *chunks_.front();
  chunk.num_taken += count;
  num_waiting_ -= count;
  if (chunk.on_disk) num_on_disk_ -= count;
  // A file is deleted as soon as all of it is read, unless a program is writing
  // to it.
  const bool done = chunk.is_full() || (chunk.on_disk && !writing_);
  if (done && chunk.num_left() == 0) {
    reuse(std::move(chunks_.front()));
    chunks_.pop_front();
  }
}

void Outfeed::raise_full(const std::string& why) const {
  throw UserError(join(
      "the outfeed queue is full", why, ": it holds ", num_waiting_,
      " elements of ", element_bytes_,
      " bytes that nobody has read, max_bytes is ", config_.max_bytes,
      ", and there is no place for element ", statistics_.enqueued,
      " (counted from 0) of ", config_.name,
      ". Read it in another thread while the program runs "
      "(queue.follow(), queue.get()), give it more memory (max_bytes), or "
      "let it drop elements or keep them on disk (when_full='drop_oldest', "
      "'drop_newest' or 'spill')"));
}

bool Outfeed::wait_for_room(Lock& lock, ops::Patience& patience) {
  if (config_.when_full == WhenFull::kRaise) raise_full("");
  ++statistics_.waits;
  const Clock::time_point began = Clock::now();
  Clock::time_point last_read = began;
  int64_t dequeued = statistics_.dequeued;
  bool lasts = true;
  const auto seconds_since = [](Clock::time_point time) {
    return std::chrono::duration<double>(Clock::now() - time).count();
  };
  while (lasts && !closed_ && !has_room()) {
    writable_.wait_for(lock, kBetweenLooks);
    if (has_room()) break;
    if (statistics_.dequeued != dequeued) {
      // A reader has read elements, and another program has used the room.
      dequeued = statistics_.dequeued;
      last_read = Clock::now();
    }
    if (!closed_ && seconds_since(last_read) >= config_.patience) {
      statistics_.seconds_waited += seconds_since(began);
      raise_full(join(", and nobody has read it for ", config_.patience,
                      " seconds (patience)"));
    }
    lock.unlock();
    lasts = patience.lasts();
    lock.lock();
  }
  statistics_.seconds_waited += seconds_since(began);
  return lasts;
}

std::span<void* const> Outfeed::begin_element(ops::Patience& patience) {
  Lock lock(mutex_);
  if (!closed_ && ++num_offered_ % config_.every != 0) return {};
  for (bool lasts = true;;) {
    if (writing_) {
      // Another program is writing its element, which takes a short time.
      writable_.wait(lock);
    } else if (lasts && stops_programs()) {
      lasts = wait_for_room(lock, patience);
    } else {
      break;
    }
  }
  check_user(!closed_,
             "the outfeed queue is closed and accepts no more elements");
  if (config_.when_full == WhenFull::kDropNewest && !has_room()) {
    ++statistics_.dropped;
    return {};
  }
  if (config_.when_full == WhenFull::kDropOldest && !has_room()) {
    ++statistics_.dropped;
    advance(1);
  }
  const std::vector<at::Tensor>* arrays = &next_;
  int64_t row = 0;
  if (!config_.last) {
    // Once elements are on disk, later ones go to disk too, until all of those
    // on disk are read: files are large.
    const bool on_disk = config_.when_full == WhenFull::kSpill &&
                         (num_on_disk_ > 0 || !has_room());
    const Chunk& chunk = writable_chunk(on_disk);
    arrays = &chunk.arrays;
    row = chunk.num_written;
  }
  for (size_t i = 0; i < places_.size(); ++i) {
    places_[i] = static_cast<char*>((*arrays)[i].mutable_data_ptr()) +
                 row * config_.components[i].bytes();
  }
  // From here on, nothing can throw.
  writing_ = true;
  return places_;
}

void Outfeed::end_element() {
  {
    const Lock lock(mutex_);
    writing_ = false;
    ++statistics_.enqueued;
    if (config_.last) {
      std::swap(newest_, next_);
      num_waiting_ = 1;
    } else {
      Chunk& chunk = *chunks_.back();
      ++chunk.num_written;
      ++num_waiting_;
      if (chunk.on_disk) {
        ++num_on_disk_;
        ++statistics_.spilled;
      }
      statistics_.peak_bytes =
          std::max(statistics_.peak_bytes,
                   (num_waiting_ - num_on_disk_) * element_bytes_);
    }
  }
  readable_.notify_one();
  // The threads that wait for room are others than those that wait for this
  // element.
  writable_.notify_all();
}

std::vector<Outfeed::Piece> Outfeed::take_pieces(int64_t count) {
  std::vector<Piece> pieces;
  while (count > 0) {
    const Chunk& chunk = *chunks_.front();
    const int64_t first = chunk.num_taken;
    Piece piece;
    piece.count = std::min(count, chunk.num_left());
    piece.movable = !chunk.on_disk && piece.count == chunk.capacity;
    for (const at::Tensor& array : chunk.arrays) {
      piece.arrays.push_back(array.narrow(0, first, piece.count));
    }
    count -= piece.count;
    statistics_.dequeued += piece.count;
    advance(piece.count);
    pieces.push_back(std::move(piece));
  }
  return pieces;
}

std::vector<at::Tensor> Outfeed::join_pieces(
    const std::vector<Piece>& pieces) const {
  std::vector<at::Tensor> joined;
  for (size_t i = 0; i < config_.components.size(); ++i) {
    if (pieces.size() == 1) {
      const at::Tensor& array = pieces.front().arrays[i];
      const bool is_small =
          pieces.front().count * element_bytes_ < kCopiedBytes;
      // A view of a part of a chunk would also keep the chunk's other elements
      // in memory.
      joined.push_back(pieces.front().movable && !is_small ? array
                                                           : array.clone());
      continue;
    }
    std::vector<at::Tensor> arrays;
    for (const Piece& piece : pieces) arrays.push_back(piece.arrays[i]);
    joined.push_back(at::cat(arrays));
  }
  return joined;
}

std::pair<int64_t, std::vector<at::Tensor>> Outfeed::take(int64_t most) {
  const c10::InferenceMode off(false);
  if (config_.last) {
    const Lock lock(mutex_);
    if (num_waiting_ == 0) return {0, {}};
    std::vector<at::Tensor> copies;
    for (const at::Tensor& array : newest_) {
      copies.push_back(array.select(0, 0).clone());
    }
    ++statistics_.dequeued;
    return {1, std::move(copies)};
  }
  std::vector<Piece> pieces;
  int64_t count = 0;
  {
    const Lock lock(mutex_);
    count = most < 0 ? num_waiting_ : std::min(most, num_waiting_);
    pieces = take_pieces(count);
  }
  writable_.notify_all();
  if (count == 0) return {0, empty_arrays(0)};
  // No program writes to the elements taken, and a chunk that a reader still
  // holds is not used again.
  return {count, join_pieces(pieces)};
}

std::vector<at::Tensor> Outfeed::take_one() {
  const c10::InferenceMode off(false);
  auto [count, tensors] = take(1);
  if (count == 0) return {};
  for (at::Tensor& tensor : tensors) {
    if (!config_.last) tensor = tensor.select(0, 0);
  }
  return std::move(tensors);
}

bool Outfeed::wait(double seconds) {
  Lock lock(mutex_);
  const int64_t num_woken = num_woken_;
  readable_.wait_for(lock, std::chrono::duration<double>(seconds), [&] {
    return num_waiting_ > 0 || closed_ || num_woken_ != num_woken;
  });
  return num_waiting_ > 0;
}

void Outfeed::wake() {
  {
    const Lock lock(mutex_);
    ++num_woken_;
  }
  readable_.notify_all();
}

void Outfeed::close() {
  {
    const Lock lock(mutex_);
    closed_ = true;
  }
  readable_.notify_all();
  writable_.notify_all();
}

OutfeedStatistics Outfeed::statistics() const {
  const Lock lock(mutex_);
  OutfeedStatistics now = statistics_;
  now.bytes = (num_waiting_ - num_on_disk_) * element_bytes_;
  now.ready = num_waiting_;
  return now;
}

}  // namespace popsim::feeds
