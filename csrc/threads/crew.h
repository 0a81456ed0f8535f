// Threads that wait for work, and do it beside the thread that gives it.
//
// Unlike the threads of a kernel (tasks.h), each has work of its own that may
// wait for that of another one.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace popsim::threads {

class Crew {
 public:
  // Starts no thread before the first work.
  explicit Crew(int64_t num_threads) : num_threads_(num_threads) {}
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;
  // Ends the threads. In a process that was forked there are none of them.
  ~Crew();

  // Calls work(i) for each i < num_threads, each on its own thread. Returns at
  // once. The work throws nothing, and stays valid until join() returns.
  void start(const std::function<void(int64_t)>& work);
  // Waits until all work is done, and calls `meanwhile` some times a second.
  void join(const std::function<void()>& meanwhile);

 private:
  void serve(int64_t number, uint64_t served);

  const int64_t num_threads_;
  int64_t process_ = 0;  // that started the threads
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wanted_;
  std::condition_variable done_;
  const std::function<void(int64_t)>* work_ = nullptr;
  uint64_t round_ = 0;  // of work that was given
  int64_t busy_ = 0;    // threads that have not finished this round
  bool over_ = false;
};

}  // namespace popsim::threads
