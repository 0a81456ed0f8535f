#include "machine/estimate/places.h"

#include <algorithm>
#include <set>
#include <utility>

#include "machine/layout.h"

namespace popsim::machine {
namespace {

using graph::kNoTensor;
using graph::Op;
using graph::Phase;
using graph::TensorId;
using graph::TensorKind;

class PlaceFinder {
 public:
  PlaceFinder(const graph::Graph& graph, const Settings& settings)
      : graph_(graph), settings_(settings) {
    places_.ipu_of_tensor.assign(graph.tensors().size(), -1);
    places_.ipu_of_op.assign(graph.ops().size(), -1);
    writer_.assign(graph.tensors().size(), kNobody);
  }

  Places find() {
    place_work();
    place_updates();
    find_crossings();
    for (const int32_t ipu : places_.ipu_of_op) {
      places_.num_ipus = std::max(places_.num_ipus, ipu + 1);
    }
    return std::move(places_);
  }

 private:
  static constexpr size_t kNobody = static_cast<size_t>(-1);

  int32_t& ipu_of(TensorId id) {
    return places_.ipu_of_tensor[static_cast<size_t>(graph_.root(id))];
  }

  // A variable is on the IPU of the first op that uses it. Updates have no
  // stage of their own, so they come later.
  void place_work() {
    for (size_t i = 0; i < graph_.ops().size(); ++i) {
      const Op& op = graph_.ops()[i];
      if (op.phase == Phase::kUpdate || op.phase == Phase::kSetup) continue;
      places_.ipu_of_op[i] = settings_.ipu_of(op.stage);
      place_tensors(op, places_.ipu_of_op[i], i);
    }
  }

  void place_tensors(const Op& op, int32_t ipu, size_t index) {
    for (const auto* ids : {&op.inputs, &op.outputs}) {
      for (const TensorId id : *ids) {
        if (id != kNoTensor && ipu_of(id) < 0) ipu_of(id) = ipu;
      }
    }
    for (const TensorId id : op.outputs) {
      if (id == kNoTensor) continue;
      size_t& writer = writer_[static_cast<size_t>(graph_.root(id))];
      if (writer == kNobody) writer = index;
    }
  }

  // An update is where its weight is. Updates of the same tensor follow each
  // other, so the order of the program places all of them.
  void place_updates() {
    for (size_t i = 0; i < graph_.ops().size(); ++i) {
      const Op& op = graph_.ops()[i];
      if (op.phase != Phase::kUpdate && op.phase != Phase::kSetup) continue;
      int32_t ipu = -1;
      for (const auto* ids : {&op.inputs, &op.outputs}) {
        for (const TensorId id : *ids) {
          if (id != kNoTensor && ipu < 0) ipu = ipu_of(id);
        }
      }
      places_.ipu_of_op[i] = std::max(ipu, 0);
      place_tensors(op, places_.ipu_of_op[i], i);
    }
  }

  void find_crossings() {
    std::set<std::pair<TensorId, int32_t>> sent;
    for (size_t i = 0; i < graph_.ops().size(); ++i) {
      const Op& op = graph_.ops()[i];
      if (op.phase == Phase::kUpdate || op.phase == Phase::kSetup) continue;
      for (const TensorId id : op.inputs) {
        if (id == kNoTensor) continue;
        const TensorId root = graph_.root(id);
        const graph::Tensor& owner = graph_.tensor(root);
        const int32_t from = ipu_of(id);
        const int32_t to = places_.ipu_of_op[i];
        // Inputs and constants come from the host to every IPU that needs them.
        const bool is_given = owner.kind == TensorKind::kInput ||
                              owner.kind == TensorKind::kConstant;
        if (from == to || is_given || !sent.emplace(root, to).second) continue;
        const size_t writer = writer_[static_cast<size_t>(root)];
        const Op& source = writer == kNobody ? op : graph_.ops()[writer];
        if (source.phase == Phase::kSetup) continue;
        const int64_t bytes =
            std::min(device_bytes(owner), device_bytes(graph_.tensor(id)));
        places_.crossings.push_back(
            {root, from, to, bytes, source.phase, source.stage, i});
      }
    }
  }

  const graph::Graph& graph_;
  const Settings& settings_;
  Places places_;
  std::vector<size_t> writer_;  // by owner: the first op that writes it
};

}  // namespace

int64_t device_bytes(const graph::Tensor& tensor) {
  return tensor.numel() * device_size(tensor.dtype);
}

Places find_places(const graph::Graph& graph, const Settings& settings) {
  return PlaceFinder(graph, settings).find();
}

}  // namespace popsim::machine
