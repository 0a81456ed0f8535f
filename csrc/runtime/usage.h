// The current use of a program: no use, one run, or one copy of tensors.
//
// No caller waits: a second caller is refused. So there are no deadlocks, and
// no caller sees tensors that a run is changing.
#pragma once

#include <atomic>
#include <cstdint>
#include <string_view>

namespace popsim::runtime {

class Usage {
 public:
  // A run, for a scope. Throws UserError if the program is in use.
  class Run {
   public:
    explicit Run(Usage& usage);
    Run(const Run&) = delete;
    Run& operator=(const Run&) = delete;
    ~Run() { usage_.leave(); }

   private:
    Usage& usage_;
  };

  // Reading or writing tensors that runs change. `what` is for the message.
  class Copy {
   public:
    Copy(Usage& usage, std::string_view what);
    Copy(const Copy&) = delete;
    Copy& operator=(const Copy&) = delete;
    ~Copy() { usage_.leave(); }

   private:
    Usage& usage_;
  };

  // Asks the run to end; any thread may call it. Returns whether there is a
  // run.
  bool stop();
  [[nodiscard]] bool running() const {
    const State state = state_.load(std::memory_order_acquire);
    return state == State::kRunning || state == State::kStopping;
  }
  [[nodiscard]] bool stopping() const {
    return state_.load(std::memory_order_relaxed) == State::kStopping;
  }

 private:
  enum class State : int8_t { kFree, kRunning, kStopping, kCopying };

  void enter(State state, std::string_view what);
  void leave() { state_.store(State::kFree, std::memory_order_release); }

  std::atomic<State> state_ = State::kFree;
};

}  // namespace popsim::runtime
