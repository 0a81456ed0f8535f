// A queue whose elements have a part of each replica.
//
// The replicas of a program enqueue one after the other, in their order. The
// first one begins an element, and the last one ends it.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "ops/run_context.h"

namespace popsim::runtime {

class SharedOutlet {
 public:
  SharedOutlet(std::shared_ptr<ops::Outlet> whole, int64_t num_replicas);

  // What a replica enqueues to.
  [[nodiscard]] ops::Outlet& of_replica(int64_t replica) {
    return parts_[static_cast<size_t>(replica)];
  }

 private:
  class Part final : public ops::Outlet {
   public:
    Part(SharedOutlet& shared, int64_t replica);

    [[nodiscard]] std::span<void* const> begin_element(
        ops::Patience& patience) override;
    [[nodiscard]] std::vector<int64_t> sizes() const override;
    void end_element() override;

   private:
    SharedOutlet& shared_;
    int64_t replica_;
    std::vector<void*> places_;
  };

  std::shared_ptr<ops::Outlet> whole_;
  std::vector<int64_t> sizes_;  // of a part
  std::deque<Part> parts_;      // by replica
  // Of the element that the first replica has begun; empty: it is not wanted.
  std::span<void* const> element_;
};

}  // namespace popsim::runtime
