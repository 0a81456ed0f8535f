#include "runtime/pace.h"

#include <algorithm>
#include <cmath>

namespace popsim::runtime {
namespace {

constexpr int64_t kMost = 100'000;
// The first time of each kind includes what a first run takes; these are tried
// one after the other before a distance is chosen.
constexpr int64_t kFirst = 6;

}  // namespace

Pace::Pace(int64_t every, double budget) : every_(every), budget_(budget) {}

void Pace::Times::add(double seconds) {
  seconds_[static_cast<size_t>(count_) % seconds_.size()] = seconds;
  ++count_;
}

double Pace::Times::shortest() const {
  const auto filled = std::min<int64_t>(count_, std::ssize(seconds_));
  if (filled == 0) return 0;
  return *std::min_element(seconds_.begin(), seconds_.begin() + filled);
}

bool Pace::observes(int64_t iteration) {
  if (every_ > 0) return iteration % every_ == 0;
  return iteration >= next_;
}

void Pace::note(int64_t iteration, bool observed, Clock::duration time) {
  if (every_ > 0) return;
  (observed ? observed_ : plain_)
      .add(std::chrono::duration<double>(time).count());
  if (!observed) return;
  if (iteration < kFirst) {
    next_ = iteration + 2;
    return;
  }
  choose_distance();
  next_ = iteration + distance_;
}

void Pace::choose_distance() {
  const double plain = plain_.shortest();
  const double extra = observed_.shortest() - plain;
  const double distance =
      plain > 0 ? std::ceil(extra / (budget_ * plain)) : static_cast<double>(1);
  // At distance 1 nothing would tell what an iteration takes without it.
  distance_ = std::clamp<int64_t>(
      std::isfinite(distance) ? static_cast<int64_t>(distance) : kMost, 2,
      kMost);
}

}  // namespace popsim::runtime
