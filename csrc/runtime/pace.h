// Chooses the device iterations in which a program is observed: every k-th one,
// or as many as a share of the run's time allows.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>

namespace popsim::runtime {

class Pace {
 public:
  using Clock = std::chrono::steady_clock;

  Pace() = default;
  // Observes the iterations 0, every, 2 * every, ... If `every` is 0, the
  // distance follows from the times of the iterations: observing them costs
  // about `budget` times what all iterations take without it.
  Pace(int64_t every, double budget);

  // Whether the iteration with this number is observed.
  [[nodiscard]] bool observes(int64_t iteration);
  // Whether note() wants to know how long iterations take.
  [[nodiscard]] bool asks_for_times() const { return every_ == 0; }
  // An iteration has ended.
  void note(int64_t iteration, bool observed, Clock::duration time);
  // The distance of observed iterations; 0 if it is not known yet.
  [[nodiscard]] int64_t every() const {
    return every_ > 0 ? every_ : distance_;
  }

 private:
  // The shortest of the last times: it says what the work takes, and others
  // also what else the machine did.
  class Times {
   public:
    void add(double seconds);
    // 0 if there are none.
    [[nodiscard]] double shortest() const;

   private:
    std::array<double, 8> seconds_{};
    int64_t count_ = 0;
  };

  void choose_distance();

  int64_t every_ = 1;
  double budget_ = 0;
  int64_t distance_ = 0;
  int64_t next_ = 1;  // the next iteration to observe
  Times plain_;
  Times observed_;
};

}  // namespace popsim::runtime
