#include "machine/estimate/allocations.h"

#include <algorithm>
#include <map>
#include <set>
#include <sstream>
#include <string>

#include "base/numbers.h"
#include "machine/estimate/code_size.h"
#include "machine/estimate/streams.h"

namespace popsim::machine {
namespace {

using graph::kNoTensor;
using graph::Op;
using graph::Phase;
using graph::Tensor;
using graph::TensorId;
using graph::TensorKind;

// Where the ops of one IPU use a tensor.
struct Use {
  int32_t first = -1;
  int32_t last = -1;
  bool written = false;  // by an op of this IPU
};

class AllocationFinder {
 public:
  AllocationFinder(const graph::Graph& graph, const Settings& settings,
                   const Places& places, const std::vector<OpCost>& costs,
                   Layouts& layouts)
      : graph_(graph),
        settings_(settings),
        places_(places),
        costs_(costs),
        layouts_(layouts),
        redrawn_(redrawn_ops(graph)) {
    const auto& positions = settings.positions;
    depth_ = schedule::position_of(positions, graph.num_stages() - 1) + 1;
    for (const auto& [id, purpose] : settings.classes) {
      if (purpose == MemoryClass::kAccumulators) {
        accumulated_.insert(graph.tensor(id).shape);
      }
    }
  }

  std::vector<Allocation> find() {
    for (int32_t ipu = 0; ipu < places_.num_ipus; ++ipu) {
      uses_.assign(graph_.tensors().size(), {});
      redrawn_values_.clear();
      collect_uses(ipu);
      pass_on_memory(ipu);
      for (size_t id = 0; id < uses_.size(); ++id) {
        if (uses_[id].first >= 0) allocate(static_cast<TensorId>(id), ipu);
      }
      add_streams(ipu);
      add_off_chip_buffer(ipu);
      add_code(ipu);
    }
    return std::move(found_);
  }

 private:
  const Op& op(int32_t index) const {
    return graph_.ops()[static_cast<size_t>(index)];
  }

  void collect_uses(int32_t ipu) {
    for (size_t i = 0; i < graph_.ops().size(); ++i) {
      const Op& one = graph_.ops()[i];
      if (places_.ipu_of_op[i] != ipu || one.phase == Phase::kSetup) continue;
      const auto index = static_cast<int32_t>(i);
      for (const TensorId id : one.inputs) {
        if (id == kNoTensor || is_elsewhere(one, id, ipu)) continue;
        touch(graph_.root(id), index);
      }
      for (const TensorId id : one.outputs) {
        if (id == kNoTensor || is_elsewhere(one, id, ipu)) continue;
        touch(graph_.root(id), index);
        uses_[static_cast<size_t>(graph_.root(id))].written = true;
        if (redrawn_[i]) redrawn_values_.insert(graph_.root(id));
      }
      if (index_of_last_[{one.phase, one.stage}] < index) {
        index_of_last_[{one.phase, one.stage}] = index;
      }
    }
    // What other IPUs need is sent when the action is over.
    for (const Crossing& crossing : places_.crossings) {
      Use& use = uses_[static_cast<size_t>(crossing.tensor)];
      if (crossing.from != ipu || use.first < 0) continue;
      use.last =
          std::max(use.last, index_of_last_[{crossing.phase, crossing.stage}]);
    }
  }

  // An op of the update that works on all weights runs on the IPU of each.
  [[nodiscard]] bool is_elsewhere(const Op& one, TensorId id,
                                  int32_t ipu) const {
    const auto root = static_cast<size_t>(graph_.root(id));
    return one.phase == Phase::kUpdate &&
           graph_.tensors()[root].kind == TensorKind::kVariable &&
           places_.ipu_of_tensor[root] != ipu;
  }

  // A gradient of a weight that several stages share is added to the
  // accumulator where it arises, and not kept for the stage that sums it up.
  [[nodiscard]] bool is_partial_gradient(TensorId root, const Use& use) const {
    const Op& first = op(use.first);
    if (first.phase != Phase::kBackward || op(use.last).stage == first.stage ||
        op(use.last).phase != Phase::kBackward) {
      return false;
    }
    return accumulated_.contains(graph_.tensor(root).shape);
  }

  void touch(TensorId root, int32_t index) {
    Use& use = uses_[static_cast<size_t>(root)];
    if (use.first < 0) use.first = index;
    use.last = index;
  }

  [[nodiscard]] int64_t copies_of(const Use& use) const {
    const Op& first = op(use.first);
    const Op& last = op(use.last);
    if (last.phase == Phase::kUpdate) return 0;
    const auto& positions = settings_.positions;
    return stash_copies(settings_.schedule, depth_, first.phase,
                        schedule::position_of(positions, first.stage),
                        last.phase,
                        schedule::position_of(positions, last.stage));
  }

  [[nodiscard]] bool is_passing(TensorId root) const {
    const Use& use = uses_[static_cast<size_t>(root)];
    return use.written && graph_.tensor(root).kind == TensorKind::kValue &&
           copies_of(use) == 0;
  }

  // An op that works in place takes the memory of an input that no later op
  // reads: the input's memory ends before the op, not after it.
  void pass_on_memory(int32_t ipu) {
    for (size_t i = 0; i < graph_.ops().size(); ++i) {
      const Op& one = graph_.ops()[i];
      if (places_.ipu_of_op[i] != ipu || one.phase == Phase::kSetup) continue;
      if (one.outputs.empty() || one.outputs[0] == kNoTensor) continue;
      if (!ops::find_op(one.kind).reuses_input) continue;
      const TensorId output = graph_.root(one.outputs[0]);
      for (const TensorId id : one.inputs) {
        if (id == kNoTensor) continue;
        const TensorId root = graph_.root(id);
        Use& use = uses_[static_cast<size_t>(root)];
        const bool fits = device_bytes(graph_.tensor(root)) ==
                          device_bytes(graph_.tensor(output));
        if (root == output || !fits || !is_passing(root) ||
            use.last != static_cast<int32_t>(i) || use.first >= use.last) {
          continue;
        }
        --use.last;
        break;
      }
    }
  }

  void allocate(TensorId id, int32_t ipu) {
    const Tensor& tensor = graph_.tensor(id);
    const Use& use = uses_[static_cast<size_t>(id)];
    switch (tensor.kind) {
      case TensorKind::kVariable:
        allocate_variable(id, ipu);
        return;
      case TensorKind::kConstant:
        add(id, MemoryClass::kParameters, ipu, -1, -1);
        return;
      case TensorKind::kInput:
        add(id, MemoryClass::kStreams, ipu, -1, -1);
        add_stash(id, ipu, copies_of(use));
        return;
      case TensorKind::kValue:
        if (redrawn_values_.contains(id) &&
            op(use.first).phase != op(use.last).phase) {
          return;
        }
        if (is_partial_gradient(id, use)) {
          const Op& first = op(use.first);
          add(id, MemoryClass::kActivations, ipu, use.first,
              index_of_last_[{first.phase, first.stage}]);
          return;
        }
        if (const int64_t copies = copies_of(use); copies > 0) {
          add_stash(id, ipu, copies);
        } else {
          add(id, MemoryClass::kActivations, ipu, use.first, use.last);
        }
        return;
      case TensorKind::kView:
        return;
    }
  }

  void allocate_variable(TensorId id, int32_t ipu) {
    const Use& use = uses_[static_cast<size_t>(id)];
    const auto found = settings_.classes.find(id);
    const MemoryClass purpose =
        found == settings_.classes.end() ? MemoryClass::kState : found->second;
    if (places_.ipu_of_tensor[static_cast<size_t>(id)] != ipu) {
      add(id, MemoryClass::kActivations, ipu, use.first, use.last);
      return;
    }
    const auto placing = settings_.placings.find(id);
    if (placing == settings_.placings.end()) {
      add(id, purpose, ipu, -1, -1);
    } else if (!placing->second.off_chip) {
      add(id, purpose, ipu, -1, -1, placing->second.shards);
    }
  }

  void add_stash(TensorId id, int32_t ipu, int64_t copies) {
    if (copies < 1) return;
    add(id, MemoryClass::kStash, ipu, -1, -1);
    found_.back().copies = copies;
  }

  void add(TensorId id, MemoryClass purpose, int32_t ipu, int32_t first,
           int32_t last, int64_t shards = 1) {
    Layout layout = layouts_.of(id);
    const int64_t bytes = device_bytes(graph_.tensor(id));
    layout.bytes_per_tile = ceil_div(layout.bytes_per_tile, shards);
    if (purpose == MemoryClass::kStreams && settings_.io_tiles > 0) {
      layout.first_tile = settings_.compute_tiles();
      layout.tiles = settings_.io_tiles;
      layout.bytes_per_tile = ceil_div(bytes, settings_.io_tiles);
    }
    found_.push_back(
        {id, purpose, ipu, ceil_div(bytes, shards), layout, 1, first, last});
  }

  // What goes to the host waits in a buffer of its own.
  void add_streams(int32_t ipu) {
    for (size_t i = 0; i < graph_.ops().size(); ++i) {
      const Op& one = graph_.ops()[i];
      if (places_.ipu_of_op[i] != ipu) continue;
      if (!goes_to_host(one) || !one.outputs.empty()) continue;
      for (const TensorId id : one.inputs) {
        if (id == kNoTensor) continue;
        add(graph_.root(id), MemoryClass::kStreams, ipu, -1, -1);
      }
    }
  }

  // Tensors that are kept off the chip come one update at a time.
  void add_off_chip_buffer(int32_t ipu) {
    Allocation largest;
    for (size_t i = 0; i < graph_.ops().size(); ++i) {
      const Op& one = graph_.ops()[i];
      if (places_.ipu_of_op[i] != ipu || one.phase != Phase::kUpdate) continue;
      Allocation sum{.purpose = MemoryClass::kState, .ipu = ipu};
      std::set<TensorId> roots;
      for (const TensorId id : one.inputs) {
        if (id == kNoTensor || !roots.insert(graph_.root(id)).second) continue;
        const auto placing = settings_.placings.find(graph_.root(id));
        if (placing == settings_.placings.end() || !placing->second.off_chip) {
          continue;
        }
        const int64_t shards = placing->second.shards;
        const Layout& layout = layouts_.of(id);
        sum.tensor = graph_.root(id);
        sum.bytes +=
            ceil_div(device_bytes(graph_.tensor(graph_.root(id))), shards);
        sum.layout.first_tile = layout.first_tile;
        sum.layout.tiles = std::max(sum.layout.tiles, layout.tiles);
        sum.layout.bytes_per_tile += ceil_div(layout.bytes_per_tile, shards);
      }
      if (sum.bytes > largest.bytes) largest = sum;
    }
    if (largest.bytes > 0) found_.push_back(largest);
  }

  void add_code(int32_t ipu) {
    const int64_t bytes = code_bytes(graph_, places_.ipu_of_op, costs_, ipu);
    Allocation code{.purpose = MemoryClass::kCode, .ipu = ipu};
    code.bytes = bytes * settings_.device.tiles;
    code.layout = {0, 0, settings_.device.tiles, bytes};
    found_.push_back(code);
  }

  const graph::Graph& graph_;
  const Settings& settings_;
  const Places& places_;
  const std::vector<OpCost>& costs_;
  Layouts& layouts_;
  std::vector<bool> redrawn_;
  int32_t depth_ = 1;
  std::vector<Use> uses_;  // of the IPU at hand, by owner
  std::set<TensorId> redrawn_values_;
  std::set<Shape> accumulated_;  // shapes of accumulators
  std::map<std::pair<Phase, int32_t>, int32_t> index_of_last_;
  std::vector<Allocation> found_;
};

}  // namespace

std::vector<Allocation> find_allocations(const graph::Graph& graph,
                                         const Settings& settings,
                                         const Places& places,
                                         const std::vector<OpCost>& costs,
                                         Layouts& layouts) {
  return AllocationFinder(graph, settings, places, costs, layouts).find();
}

std::vector<bool> redrawn_ops(const graph::Graph& graph) {
  std::vector<bool> drawn(graph.tensors().size());
  std::vector<bool> found(graph.ops().size());
  for (size_t i = 0; i < graph.ops().size(); ++i) {
    const Op& op = graph.ops()[i];
    if (op.phase != Phase::kForward) continue;
    const bool only_drawn =
        op.kind == "map" && !op.inputs.empty() &&
        std::ranges::all_of(op.inputs, [&](TensorId id) {
          return id != kNoTensor && drawn[static_cast<size_t>(graph.root(id))];
        });
    const bool is_random = op.kind == "random" && op.inputs.empty();
    found[i] = is_random || only_drawn;
    for (const TensorId id : op.outputs) {
      if (id != kNoTensor && found[i]) {
        drawn[static_cast<size_t>(graph.root(id))] = true;
      }
    }
  }
  return found;
}

int64_t stash_copies(schedule::Kind kind, int32_t depth, Phase from_phase,
                     int32_t from, Phase to_phase, int32_t to) {
  using schedule::Kind;
  if (kind == Kind::kSequential) return 0;
  // Of PopTorch's pipeline the last stage runs backward in the same step.
  const int64_t turn = kind == Kind::kPipelined ? 2 * depth - 2 : 2 * depth - 1;
  const auto step = [&](Phase phase, int32_t position) {
    return phase == Phase::kBackward ? turn - position : int64_t{position};
  };
  const int64_t between = step(to_phase, to) - step(from_phase, from);
  if (between <= 0) return 0;
  switch (kind) {
    case Kind::kPipelined:
      return between + 1;
    case Kind::kGrouped:
      return between - 1;
    default:
      return (between - 1) / 2;
  }
}

}  // namespace popsim::machine
