// A queue that gets no element of a device iteration twice, if the iteration is
// repeated after a check of its numbers has failed.
//
// Both tries enqueue equal elements in the same order. So a repeated iteration
// leaves out as many elements as the failed one has completed.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "ops/run_context.h"

namespace popsim::runtime {

class OnceOutlet final : public ops::Outlet {
 public:
  explicit OnceOutlet(std::shared_ptr<ops::Outlet> whole)
      : whole_(std::move(whole)) {}

  // Call it before each device iteration; `again` if it is repeated.
  void begin_iteration(bool again) {
    num_left_out_ = again ? num_complete_ : 0;
    num_complete_ = 0;
  }

  [[nodiscard]] std::span<void* const> begin_element(
      ops::Patience& patience) override {
    if (num_complete_ < num_left_out_) {
      ++num_complete_;
      return {};
    }
    const std::span<void* const> places = whole_->begin_element(patience);
    if (places.empty()) ++num_complete_;
    return places;
  }
  [[nodiscard]] std::vector<int64_t> sizes() const override {
    return whole_->sizes();
  }
  void end_element() override {
    whole_->end_element();
    ++num_complete_;
  }

 private:
  std::shared_ptr<ops::Outlet> whole_;
  int64_t num_complete_ = 0;  // of this device iteration
  int64_t num_left_out_ = 0;  // the first ones, which the queue has already
};

}  // namespace popsim::runtime
