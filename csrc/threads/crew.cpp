#include "threads/crew.h"

#include <unistd.h>

#include <chrono>
#include <new>

namespace popsim::threads {
namespace {

constexpr std::chrono::milliseconds kBetweenCalls{20};

}  // namespace

Crew::~Crew() {
  if (threads_.empty()) return;
  if (process_ != getpid()) {
    // Their stacks are copies without threads: nothing can be joined.
    for (std::thread& thread : threads_) thread.detach();
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    over_ = true;
  }
  wanted_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Crew::start(const std::function<void(int64_t)>& work) {
  if (!threads_.empty() && process_ != getpid()) {
    for (std::thread& thread : threads_) thread.detach();
    threads_.clear();
    // The thread that held these at the fork, if one did, is not here.
    new (&mutex_) std::mutex;
    new (&wanted_) std::condition_variable;
    new (&done_) std::condition_variable;
    busy_ = 0;
  }
  const std::lock_guard lock(mutex_);
  while (std::ssize(threads_) < num_threads_) {
    process_ = getpid();
    const int64_t number = std::ssize(threads_);
    const uint64_t served = round_;
    threads_.emplace_back([this, number, served] { serve(number, served); });
  }
  work_ = &work;
  busy_ = num_threads_;
  ++round_;
  wanted_.notify_all();
}

void Crew::join(const std::function<void()>& meanwhile) {
  std::unique_lock lock(mutex_);
  while (!done_.wait_for(lock, kBetweenCalls, [this] { return busy_ == 0; })) {
    lock.unlock();
    meanwhile();
    lock.lock();
  }
}

void Crew::serve(int64_t number, uint64_t served) {
  std::unique_lock lock(mutex_);
  for (;;) {
    wanted_.wait(lock, [&] { return over_ || round_ != served; });
    if (over_) return;
    served = round_;
    const std::function<void(int64_t)>& work = *work_;
    lock.unlock();
    work(number);
    lock.lock();
    if (--busy_ == 0) done_.notify_all();
  }
}

}  // namespace popsim::threads
