#include "runtime/version.h"

namespace popsim::runtime {
namespace {

Lanes make_lanes(const Plan& plan, const DeviceStorage& storage) {
  Lanes lanes(static_cast<size_t>(plan.replicas().count));
  for (int32_t r = 0; r < plan.replicas().count; ++r) {
    auto& own = lanes[static_cast<size_t>(r)];
    for (int32_t number = 0; number < plan.num_lanes(); ++number) {
      own.push_back(std::make_unique<Lane>(plan, storage, r, number));
    }
    own[0]->share_update(lanes);
  }
  return lanes;
}

}  // namespace

Version::Version(const Plan& plan, const Version* beside)
    : plan(plan),
      storage(plan, beside == nullptr ? nullptr : &beside->storage),
      lanes(make_lanes(plan, storage)),
      team(plan, lanes) {
  for (const auto& of_replica : lanes) {
    memories.push_back(&of_replica[0]->memory());
    pointers_.push_back(memories.back()->pointers());
  }
  if (lanes.size() == 1) return;
  for (const auto& of_replica : lanes) of_replica[0]->see(pointers_);
}

void Version::load(std::span<Listener* const> listeners) {
  lanes[0][0]->load(listeners);
}

void Version::begin_run(const Call& call, int64_t iterations_before,
                        bool* ended, ops::NumberChecks* checks) {
  for (const auto& of_replica : lanes) {
    for (const auto& lane : of_replica) {
      lane->begin_run(call, iterations_before, ended, checks);
    }
  }
}

}  // namespace popsim::runtime
