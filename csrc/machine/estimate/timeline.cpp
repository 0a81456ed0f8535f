#include "machine/estimate/timeline.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "machine/constants.h"
#include "machine/estimate/links.h"
#include "machine/estimate/memory.h"
#include "machine/estimate/streams.h"

namespace popsim::machine {
namespace {

using graph::kNoTensor;
using graph::Op;
using graph::Phase;
using graph::TensorId;
using schedule::ActionKind;

using ActionKey = std::pair<ActionKind, int32_t>;  // with its stage

ActionKind action_of(Phase phase) {
  return phase == Phase::kForward    ? ActionKind::kForward
         : phase == Phase::kBackward ? ActionKind::kBackward
                                     : ActionKind::kUpdate;
}

class Planner {
 public:
  Planner(const graph::Graph& graph, const Settings& settings,
          const Places& places, const std::vector<OpCost>& costs)
      : graph_(graph),
        settings_(settings),
        places_(places),
        costs_(costs),
        num_stages_(graph.num_stages()),
        updates_(static_cast<size_t>(places.num_ipus)) {}

  ProgramTime plan() {
    time_.ipus.resize(static_cast<size_t>(places_.num_ipus));
    sum_host();
    sum_ops();
    add_redrawn();
    sum_update();
    sum_links();
    plan_slots();
    sum_call();
    plan_latency();
    return std::move(time_);
  }

 private:
  // --- Work -----------------------------------------------------------------

  void sum_ops() {
    for (size_t i = 0; i < graph_.ops().size(); ++i) {
      const Op& op = graph_.ops()[i];
      if (op.phase == Phase::kSetup) continue;
      if (op.phase == Phase::kUpdate) {
        const auto ipu = static_cast<size_t>(places_.ipu_of_op[i]);
        updates_[ipu] += costs_[i].cycles() / shards_of(op);
      } else {
        work_[{action_of(op.phase), op.stage}].add(costs_[i]);
      }
    }
  }

  // An update whose state is shared out works on a part of it.
  double shards_of(const Op& op) const {
    int64_t shards = 1;
    for (const TensorId id : op.inputs) {
      if (id == kNoTensor) continue;
      const auto found = settings_.placings.find(graph_.root(id));
      if (found == settings_.placings.end()) continue;
      shards = std::max(shards, found->second.shards);
    }
    return static_cast<double>(shards);
  }

  // Random numbers that the backward pass needs again are drawn again.
  void add_redrawn() {
    const std::vector<bool> redrawn = redrawn_ops(graph_);
    std::map<TensorId, size_t> writers;
    for (size_t i = 0; i < graph_.ops().size(); ++i) {
      for (const TensorId id : graph_.ops()[i].outputs) {
        if (redrawn[i] && id != kNoTensor) writers[graph_.root(id)] = i;
      }
    }
    std::set<size_t> again;
    for (const Op& op : graph_.ops()) {
      if (op.phase == Phase::kBackward) draw_again(op, writers, again);
    }
    for (const size_t i : again) {
      work_[{ActionKind::kBackward, graph_.ops()[i].stage}].add(costs_[i]);
    }
  }

  void draw_again(const Op& op, const std::map<TensorId, size_t>& writers,
                  std::set<size_t>& again) const {
    for (const TensorId id : op.inputs) {
      if (id == kNoTensor) continue;
      const auto found = writers.find(graph_.root(id));
      if (found == writers.end() || !again.insert(found->second).second) {
        continue;
      }
      draw_again(graph_.ops()[found->second], writers, again);
    }
  }

  // --- Host -----------------------------------------------------------------

  void sum_host() {
    const auto traffic = host_traffic(graph_, settings_, places_);
    std::set<int32_t> streaming;
    for (size_t i = 0; i < traffic.size(); ++i) {
      const Op& op = graph_.ops()[i];
      if (traffic[i].copies == 0 || op.phase == Phase::kSetup) continue;
      streaming.insert(places_.ipu_of_op[i]);
      host_[{action_of(op.phase),
             op.phase == Phase::kUpdate ? places_.ipu_of_op[i] : op.stage}] +=
          traffic[i];
    }
    // IPUs of one machine share its way to the host.
    const int64_t replicas_of_machine = std::min<int64_t>(
        settings_.replicas,
        std::max<int64_t>(constants::kIpusOfMachine / places_.num_ipus, 1));
    streaming_ = std::ssize(streaming) * replicas_of_machine;
  }

  [[nodiscard]] double host_of(const ActionKey& key) const {
    const auto found = host_.find(key);
    return found == host_.end()
               ? 0
               : host_cycles(found->second, settings_, streaming_);
  }

  // The cycles of an action; what runs beside it counts only if it takes
  // longer.
  [[nodiscard]] Parts parts_of(const ActionKey& key) const {
    const auto found = work_.find(key);
    Parts parts = found == work_.end() ? Parts{} : found->second;
    const double host = host_of(key);
    parts.host =
        settings_.overlaps_io ? std::max(0.0, host - parts.sum()) : host;
    return parts;
  }

  // --- Updates --------------------------------------------------------------

  void sum_update() {
    std::vector<double> reduced(updates_.size());
    std::vector<double> away(updates_.size());
    std::set<TensorId> seen;
    for (size_t i = 0; i < graph_.ops().size(); ++i) {
      const Op& op = graph_.ops()[i];
      const auto ipu = static_cast<size_t>(places_.ipu_of_op[i]);
      if (op.kind == "all_reduce") {
        for (const TensorId id : op.inputs) {
          if (id == kNoTensor) continue;
          const int32_t home =
              places_.ipu_of_tensor[static_cast<size_t>(graph_.root(id))];
          reduced[static_cast<size_t>(std::max(home, 0))] +=
              static_cast<double>(device_bytes(graph_.tensor(id)));
        }
      }
      if (op.phase != Phase::kUpdate) continue;
      for (const TensorId id : op.inputs) {
        if (id == kNoTensor || !seen.insert(graph_.root(id)).second) continue;
        away[ipu] += bytes_away(graph_.root(id));
      }
    }
    const double rate =
        constants::kOffChipRate.value / double{constants::kIpusOfMachine};
    for (size_t ipu = 0; ipu < updates_.size(); ++ipu) {
      updates_[ipu] +=
          settings_.device.cycles_of(2 * away[ipu] / rate) +
          host_of({ActionKind::kUpdate, static_cast<int32_t>(ipu)});
      time_.update_cycles = std::max(time_.update_cycles, updates_[ipu]);
      time_.traffic.off_chip_bytes +=
          2 * away[ipu] * static_cast<double>(settings_.repeats());
    }
    const double most = reduced.empty() ? 0 : std::ranges::max(reduced);
    const auto repeats = static_cast<double>(settings_.repeats());
    time_.all_reduce_cycles = all_reduce_cycles(
        settings_.device, settings_.replicas, places_.num_ipus, most);
    time_.traffic.all_reduce_bytes =
        all_reduce_bytes(settings_.replicas, most) * repeats;
    time_.traffic.all_reduces =
        time_.all_reduce_cycles > 0 ? settings_.repeats() : 0;
  }

  [[nodiscard]] double bytes_away(TensorId root) const {
    const auto found = settings_.placings.find(root);
    if (found == settings_.placings.end() || !found->second.off_chip) return 0;
    return static_cast<double>(device_bytes(graph_.tensor(root))) /
           static_cast<double>(found->second.shards);
  }

  // --- Links ----------------------------------------------------------------

  void sum_links() {
    std::map<std::pair<std::pair<int32_t, int32_t>, bool>, double> bytes;
    for (const Crossing& one : places_.crossings) {
      const auto size = static_cast<double>(one.bytes);
      transfers_[{action_of(one.phase), one.stage}].push_back(
          {one.from, one.to, size});
      bytes[{{one.from, one.to}, one.phase == Phase::kBackward}] += size;
    }
    for (const auto& [way, sum] : bytes) {
      const auto [from, to] = way.first;
      const double cycles = external_sync(settings_.device, places_.num_ipus) +
                            link_cycles(settings_.device, {{from, to, sum}});
      time_.links.push_back({from, to, way.second, sum, cycles});
    }
  }

  // --- Slots ----------------------------------------------------------------

  void plan_slots() {
    const schedule::Schedule plan = schedule::generate(
        settings_.schedule, {num_stages_, settings_.scheduled(),
                             settings_.training, settings_.positions});
    const double least = least_slot();
    for (const schedule::Stretch& stretch : plan) {
      SlotStretch slots{stretch.times, {}};
      for (const schedule::ActionList& actions : schedule::times_of(stretch)) {
        slots.slots.push_back(slot_of(actions, least));
        add_busy(slots.slots.back(), stretch.times);
      }
      for (const Slot& slot : slots.slots) {
        const auto times = static_cast<double>(stretch.times);
        time_.run_cycles += times * slot.cycles;
        link_sum_ += times * slot.link_cycles;
      }
      time_.stretches.push_back(std::move(slots));
    }
    time_.run_cycles += time_.all_reduce_cycles;
  }

  // If slots are interleaved, each is long enough for either pass.
  [[nodiscard]] double least_slot() const {
    double longest = 0;
    if (settings_.schedule != schedule::Kind::kInterleaved) return longest;
    for (int32_t stage = 0; stage < num_stages_; ++stage) {
      for (const auto kind : {ActionKind::kForward, ActionKind::kBackward}) {
        longest = std::max(longest, parts_of({kind, stage}).sum());
      }
    }
    return longest;
  }

  Slot slot_of(const schedule::ActionList& actions, double least) const {
    Slot slot;
    // Of grouped passes all backward ones begin when all forward ones are done.
    const bool in_groups = settings_.schedule == schedule::Kind::kGrouped;
    std::map<int32_t, double> work[2];  // by group, then by IPU
    std::vector<Transfer> transfers;
    for (const schedule::Action& action : actions) {
      if (action.kind == ActionKind::kUpdate) {
        for (int32_t ipu = 0; ipu < places_.num_ipus; ++ipu) {
          const double cycles = updates_[static_cast<size_t>(ipu)];
          slot.actions.push_back({action.kind, 0, ipu, 0, cycles});
          slot.cycles = std::max(slot.cycles, cycles);
        }
        return slot;
      }
      const ActionKey key{action.kind, action.stage};
      const int32_t ipu = settings_.ipu_of(action.stage);
      const double cycles = parts_of(key).sum();
      slot.actions.push_back(
          {action.kind, action.stage, ipu, action.micro_batch, cycles});
      const bool second = in_groups && action.kind == ActionKind::kBackward;
      work[second ? 1 : 0][ipu] += cycles;
      const auto sent = transfers_.find(key);
      if (sent == transfers_.end()) continue;
      transfers.insert(transfers.end(), sent->second.begin(),
                       sent->second.end());
    }
    for (const auto& of_ipu : work) {
      double longest = 0;
      for (const auto& [ipu, cycles] : of_ipu) {
        longest = std::max(longest, cycles);
      }
      slot.cycles += longest;
    }
    slot.cycles = std::max(slot.cycles, least);
    if (!transfers.empty()) {
      slot.link_cycles = external_sync(settings_.device, places_.num_ipus) +
                         link_cycles(settings_.device, transfers);
      slot.cycles += slot.link_cycles;
    }
    return slot;
  }

  void add_busy(const Slot& slot, int64_t times) {
    for (const SlotAction& action : slot.actions) {
      time_.ipus[static_cast<size_t>(action.ipu)].busy +=
          action.cycles * static_cast<double>(times);
    }
  }

  // --- The call -------------------------------------------------------------

  void sum_call() {
    const auto repeats = static_cast<double>(settings_.repeats());
    const auto micro_batches = static_cast<double>(settings_.micro_batches());
    time_.call_cycles = repeats * time_.run_cycles + round_trip_cycles();
    for (int32_t ipu = 0; ipu < places_.num_ipus; ++ipu) {
      IpuTime& one = time_.ipus[static_cast<size_t>(ipu)];
      one.use = time_.run_cycles > 0 ? one.busy / time_.run_cycles : 0;
      for (int32_t stage = 0; stage < num_stages_; ++stage) {
        if (settings_.ipu_of(stage) != ipu) continue;
        for (const auto kind : {ActionKind::kForward, ActionKind::kBackward}) {
          one.call.add(parts_of({kind, stage}), micro_batches);
        }
      }
      one.call.update = repeats * updates_[static_cast<size_t>(ipu)];
      if (!settings_.training) one.call.update = 0;
      one.call.all_reduce = repeats * time_.all_reduce_cycles;
      one.call.links = repeats * link_sum_;
      one.call.host += round_trip_cycles();
      one.call.waiting = std::max(0.0, time_.call_cycles - one.call.sum());
    }
    for (const auto& [key, traffic] : host_) {
      const double times =
          key.first == ActionKind::kUpdate ? repeats : micro_batches;
      time_.traffic.host_in_bytes += traffic.bytes_in * times;
      time_.traffic.host_out_bytes += traffic.bytes_out * times;
    }
  }

  // Micro-batch 0 on its way to the last forward action.
  void plan_latency() {
    HostTraffic in;
    HostTraffic out;
    for (const auto& [key, traffic] : host_) {
      if (key.first == ActionKind::kUpdate) continue;
      in += {traffic.bytes_in, 0, traffic.bytes_in > 0 ? 1.0 : 0.0, 0};
      out += {0, traffic.bytes_out, traffic.bytes_out > 0 ? 1.0 : 0.0, 0};
    }
    const Device& device = settings_.device;
    time_.latency.host_to_ipu =
        device.seconds_of(host_cycles(in, settings_, streaming_));
    time_.latency.ipu_to_host =
        device.seconds_of(host_cycles(out, settings_, streaming_));
    double since = 0;
    double last = 0;
    for (const SlotStretch& stretch : time_.stretches) {
      for (const Slot& slot : stretch.slots) {
        since += slot.cycles;
        for (const SlotAction& action : slot.actions) {
          const bool first =
              action.micro_batch == 0 && action.kind == ActionKind::kForward;
          if (first) last = since;
        }
      }
    }
    time_.latency.compute =
        std::max(0.0, device.seconds_of(last) - time_.latency.host_to_ipu -
                          time_.latency.ipu_to_host);
  }

  const graph::Graph& graph_;
  const Settings& settings_;
  const Places& places_;
  const std::vector<OpCost>& costs_;
  int32_t num_stages_;
  std::vector<double> updates_;  // cycles, by IPU
  std::map<ActionKey, Parts> work_;
  std::map<ActionKey, HostTraffic> host_;  // of updates by IPU, not stage
  std::map<ActionKey, std::vector<Transfer>> transfers_;
  int64_t streaming_ = 1;
  double link_sum_ = 0;  // of one run
  ProgramTime time_;
};

}  // namespace

void Parts::add(const OpCost& cost) {
  compute += cost.compute;
  exchange += cost.exchange;
  sync += cost.sync;
  glue += cost.glue;
}

void Parts::add(const Parts& other, double times) {
  compute += other.compute * times;
  exchange += other.exchange * times;
  sync += other.sync * times;
  glue += other.glue * times;
  links += other.links * times;
  host += other.host * times;
  update += other.update * times;
  all_reduce += other.all_reduce * times;
  waiting += other.waiting * times;
}

double Parts::sum() const {
  return compute + exchange + sync + glue + links + host + update + all_reduce +
         waiting;
}

ProgramTime plan_time(const graph::Graph& graph, const Settings& settings,
                      const Places& places, const std::vector<OpCost>& costs) {
  return Planner(graph, settings, places, costs).plan();
}

}  // namespace popsim::machine
