#include "runtime/shared_outlet.h"

#include <utility>

namespace popsim::runtime {

SharedOutlet::SharedOutlet(std::shared_ptr<ops::Outlet> whole,
                           int64_t num_replicas)
    : whole_(std::move(whole)), sizes_(whole_->sizes()) {
  for (int64_t& size : sizes_) size /= num_replicas;
  for (int64_t r = 0; r < num_replicas; ++r) parts_.emplace_back(*this, r);
}

SharedOutlet::Part::Part(SharedOutlet& shared, int64_t replica)
    : shared_(shared), replica_(replica), places_(shared.sizes_.size()) {}

std::span<void* const> SharedOutlet::Part::begin_element(
    ops::Patience& patience) {
  if (replica_ == 0) shared_.element_ = shared_.whole_->begin_element(patience);
  if (shared_.element_.empty()) return {};
  for (size_t i = 0; i < places_.size(); ++i) {
    places_[i] =
        static_cast<char*>(shared_.element_[i]) + replica_ * shared_.sizes_[i];
  }
  return places_;
}

std::vector<int64_t> SharedOutlet::Part::sizes() const {
  return shared_.sizes_;
}

void SharedOutlet::Part::end_element() {
  if (replica_ + 1 == std::ssize(shared_.parts_)) shared_.whole_->end_element();
}

}  // namespace popsim::runtime
