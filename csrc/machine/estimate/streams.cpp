#include "machine/estimate/streams.h"

#include <algorithm>
#include <set>
#include <string>

#include "machine/constants.h"

namespace popsim::machine {
namespace {

using graph::kNoTensor;
using graph::Op;
using graph::Phase;
using graph::TensorId;

// How often an op's tensor goes to the host, as a share of its executions.
double share_returned(const ops::OpView& op, const Settings& settings) {
  const auto& mode = op.attribute<std::string>("mode");
  const auto iterations = static_cast<double>(settings.device_iterations);
  if (mode == "All") return 1;
  if (mode == "EveryN") {
    const auto period = static_cast<double>(op.attribute<int64_t>("period"));
    return 1 / period;
  }
  const bool per_update = op.op().phase == Phase::kUpdate;
  return 1 / (per_update ? iterations
                         : static_cast<double>(settings.micro_batches()));
}

HostTraffic sent_by(const graph::Graph& graph, const Op& op,
                    const Settings& settings) {
  HostTraffic traffic;
  if (!goes_to_host(op)) return traffic;
  const ops::OpView view(graph, op);
  const double share =
      view.has_attribute("mode") ? share_returned(view, settings) : 1;
  for (const TensorId id : op.inputs) {
    if (id == kNoTensor) continue;
    traffic.bytes_out +=
        share * static_cast<double>(device_bytes(graph.tensor(id)));
    traffic.copies += share;
  }
  if (!ops::find_op(op.kind).calls_host) return traffic;
  traffic.blocking = 1;
  for (const TensorId id : op.outputs) {
    if (id == kNoTensor) continue;
    traffic.bytes_in += static_cast<double>(device_bytes(graph.tensor(id)));
    traffic.copies += 1;
  }
  return traffic;
}

}  // namespace

bool goes_to_host(const graph::Op& op) {
  return ops::find_op(op.kind).family == "host";
}

HostTraffic& HostTraffic::operator+=(const HostTraffic& other) {
  bytes_in += other.bytes_in;
  bytes_out += other.bytes_out;
  copies += other.copies;
  blocking += other.blocking;
  return *this;
}

std::vector<HostTraffic> host_traffic(const graph::Graph& graph,
                                      const Settings& settings,
                                      const Places& places) {
  std::vector<HostTraffic> all;
  std::set<std::pair<TensorId, int32_t>> seen;
  for (size_t i = 0; i < graph.ops().size(); ++i) {
    const Op& op = graph.ops()[i];
    all.push_back(sent_by(graph, op, settings));
    if (settings.feed == HostFeed::kNone || op.phase == Phase::kSetup) continue;
    for (const TensorId id : op.inputs) {
      if (id == kNoTensor) continue;
      const TensorId root = graph.root(id);
      const graph::Tensor& tensor = graph.tensor(root);
      if (tensor.kind != graph::TensorKind::kInput) continue;
      if (!seen.emplace(root, places.ipu_of_op[i]).second) continue;
      all.back().bytes_in += static_cast<double>(device_bytes(tensor));
      all.back().copies += 1;
    }
  }
  return all;
}

double host_cycles(const HostTraffic& traffic, const Settings& settings,
                   int64_t streaming) {
  const double shared = constants::kHostRateOfMachine.value /
                        static_cast<double>(std::max<int64_t>(streaming, 1));
  const double rate = std::min(constants::kHostRate.value, shared);
  const bool staged =
      settings.feed == HostFeed::kStaged && !settings.overlaps_io;
  const double rate_in =
      staged ? std::min(constants::kStagedHostRate.value, rate) : rate;
  const double seconds = traffic.bytes_in / rate_in + traffic.bytes_out / rate;
  return settings.device.cycles_of(seconds) +
         traffic.copies * constants::kStreamCopy.value +
         traffic.blocking * round_trip_cycles();
}

double round_trip_cycles() {
  return constants::kHostBegin.value + constants::kHostEnd.value;
}

}  // namespace popsim::machine
