#include "feeds/infeed.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/numbers.h"
#include "ops/operands/aten_types.h"

namespace popsim::feeds {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kAlignment = 64;
constexpr std::chrono::milliseconds kBetweenQuestions{20};

double seconds_since(Clock::time_point began) {
  return std::chrono::duration<double>(Clock::now() - began).count();
}

}  // namespace

Infeed::Infeed(Components components, int64_t depth)
    : components_(std::move(components)) {
  check_internal(depth > 0, "infeed: a depth of ", depth);
  for (int64_t i = 0; i < depth; ++i) slots_.push_back(make_slot());
}

Infeed::Slot Infeed::make_slot() const {
  int64_t bytes = 0;
  for (const Component& component : components_) {
    bytes += round_up(component.bytes(), kAlignment);
  }
  // ATen allocates memory at multiples of 64.
  Slot slot{at::empty({std::max<int64_t>(bytes, 1)}, at::kByte), {}};
  auto* next = static_cast<char*>(slot.memory.mutable_data_ptr());
  for (const Component& component : components_) {
    slot.places.push_back(next);
    next += round_up(component.bytes(), kAlignment);
  }
  return slot;
}

std::span<void* const> Infeed::acquire(ops::Patience& patience) {
  Lock lock(mutex_);
  if (num_ready_ == 0) {
    ++statistics_.waits;
    const Clock::time_point began = Clock::now();
    bool lasts = true;
    while (lasts && num_ready_ == 0 && !ended_ && !closed_) {
      readable_.wait_for(lock, kBetweenQuestions);
      if (num_ready_ > 0) break;
      lock.unlock();
      lasts = patience.lasts();
      lock.lock();
    }
    statistics_.seconds_waited += seconds_since(began);
    if (num_ready_ == 0) {
      if (closed_) throw runtime::FeedEnd("the infeed queue is closed");
      if (ended_) throw runtime::FeedEnd(end_message_);
      return {};
    }
  }
  const Slot& next = slot(num_acquired_);
  ++num_acquired_;
  --num_ready_;
  ++statistics_.taken;
  return next.places;
}

void Infeed::release() {
  {
    const Lock lock(mutex_);
    first_ = (first_ + 1) % std::ssize(slots_);
    --num_acquired_;
  }
  writable_.notify_one();
}

int64_t Infeed::depth() const {
  const Lock lock(mutex_);
  return std::ssize(slots_);
}

void Infeed::check(const std::vector<at::Tensor>& tensors) const {
  check_user(tensors.size() == components_.size(), "an element has ",
             tensors.size(), " tensors, but the first element had ",
             components_.size(),
             ": every element of a queue needs the same tensors");
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Component& component = components_[i];
    check_user(
        tensors[i].is_contiguous() && tensors[i].device().is_cpu() &&
            tensors[i].sizes() == component.shape &&
            tensors[i].scalar_type() == ops::to_scalar_type(component.dtype),
        "tensor ", i, " of an element must be a contiguous ",
        name_of(component.dtype), to_string(component.shape));
  }
}

bool Infeed::push(const std::vector<at::Tensor>& tensors, double seconds) {
  check(tensors);
  const Slot* target = nullptr;
  {
    Lock lock(mutex_);
    if (is_full() && !closed_) {
      const Clock::time_point began = Clock::now();
      writable_.wait_for(lock, std::chrono::duration<double>(seconds),
                         [&] { return !is_full() || closed_; });
      statistics_.seconds_full += seconds_since(began);
    }
    if (closed_ || is_full()) return false;
    pushing_ = true;
    target = &slot(num_acquired_ + num_ready_);
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (components_[i].bytes() == 0) continue;
    std::memcpy(target->places[i], tensors[i].const_data_ptr(),
                static_cast<size_t>(components_[i].bytes()));
  }
  {
    const Lock lock(mutex_);
    pushing_ = false;
    ++num_ready_;
    ++statistics_.pushed;
  }
  readable_.notify_one();
  writable_.notify_all();
  return true;
}

void Infeed::end(std::string message) {
  {
    const Lock lock(mutex_);
    ended_ = true;
    end_message_ = std::move(message);
  }
  readable_.notify_all();
}

void Infeed::clear() {
  Lock lock(mutex_);
  writable_.wait(lock, [&] { return !pushing_; });
  num_ready_ = 0;
  ended_ = false;
  lock.unlock();
  writable_.notify_all();
}

void Infeed::close() {
  {
    const Lock lock(mutex_);
    closed_ = true;
  }
  readable_.notify_all();
  writable_.notify_all();
}

bool Infeed::closed() const {
  const Lock lock(mutex_);
  return closed_;
}

void Infeed::ensure_depth(int64_t slots) {
  Lock lock(mutex_);
  if (slots <= std::ssize(slots_)) return;
  writable_.wait(lock, [&] { return !pushing_; });
  // Programs hold pointers to the slots' memory, which does not move.
  std::ranges::rotate(slots_, slots_.begin() + first_);
  first_ = 0;
  while (std::ssize(slots_) < slots) slots_.push_back(make_slot());
  lock.unlock();
  writable_.notify_all();
}

InfeedStatistics Infeed::statistics() const {
  const Lock lock(mutex_);
  InfeedStatistics now = statistics_;
  now.ready = num_ready_;
  now.depth = std::ssize(slots_);
  return now;
}

}  // namespace popsim::feeds
