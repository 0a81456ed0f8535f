// Who uses a program at the moment: nobody, one run, or one copy of tensors.
//
// Nobody waits: whoever comes second is refused. So nothing can lock up, and
// nobody sees tensors that a run is changing.
#pragma once

#include <atomic>
#include <cstdint>
#include <string_view>

namespace popsim::runtime {

class Usage {
 public:
  // A run, for the length of a scope. Throws UserError if the program is used.
  class Run {
   public:
    explicit Run(Usage& usage);
    Run(const Run&) = delete;
    Run& operator=(const Run&) = delete;
    ~Run() { usage_.leave(); }

   private:
    Usage& usage_;
  };

  // Reading or writing what runs change. `what` is for the message.
  class Copy {
   public:
    Copy(Usage& usage, std::string_view what);
    Copy(const Copy&) = delete;
    Copy& operator=(const Copy&) = delete;
    ~Copy() { usage_.leave(); }

   private:
    Usage& usage_;
  };

  // Asks the run to end; from any thread. Returns whether there is one.
  bool stop();
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
