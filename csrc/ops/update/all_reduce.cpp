// Adds up the accumulated gradients of all replicas that train a model
// together, in place, before the update.
//
// The sum of a group of replicas takes the place of the gradient of its first
// replica. Replicas are added in pairs of neighbours, then pairs of pairs, so
// that the order does not depend on threads; processes go on in the same way.
#include <algorithm>
#include <bit>
#include <utility>
#include <vector>

#include "ops/exchange.h"
#include "ops/op_def.h"
#include "ops/update/parts.h"
#include "ops/work.h"

namespace popsim::ops {
namespace {

// What an op of one replica sees of another one.
class OtherReplica final : public RunContext {
 public:
  OtherReplica(const RunContext& own, int64_t replica) {
    pointers = own.of_replicas[static_cast<size_t>(replica)];
    cursor = own.cursor;
    seed = own.seed;
  }
  const at::Tensor& tensor(graph::TensorId /*id*/) const override {
    throw InternalError("all_reduce: reads no at::Tensor");
  }
};

// Calls body with the context of a replica.
template <typename Body>
void on_replica(const RunContext& context, int64_t replica, const Body& body) {
  if (context.of_replicas.empty()) {
    body(context);
  } else {
    body(OtherReplica(context, replica));
  }
}

// The gradient of a weight, for a group of replicas.
class Reduction {
 public:
  Reduction(const OpView& op, std::vector<int64_t> replicas)
      : replicas_(std::move(replicas)),
        numel_(op.input(0).numel()),
        accumulator_(op, 0, 0, op.input(0).shape) {}

  [[nodiscard]] int64_t numel() const { return numel_; }
  // Its elements are those from `start` on of an exchange.
  void begin_at(int64_t start) { start_ = start; }

  // Adds up a block over the replicas of the group, into `numbers`, or else
  // into the memory of the first one.
  void add_up(const RunContext& context, int64_t begin, int64_t size,
              float* numbers) const {
    update::Scratch sum;
    add_up(context, begin, size, 0, replicas_.size(), sum.data());
    if (numbers != nullptr) {
      std::copy_n(sum.data(), size, numbers + start_ + begin);
    } else {
      store(context, begin, size, sum.data());
    }
  }
  // Takes the sum over all processes.
  void take(const RunContext& context, int64_t begin, int64_t size,
            const float* numbers) const {
    store(context, begin, size, numbers + start_ + begin);
  }

 private:
  // The sum over some replicas of the group.
  void add_up(const RunContext& context, int64_t begin, int64_t size,
              size_t first, size_t last, float* sum) const {
    if (last - first == 1) {
      on_replica(context, replicas_[first], [&](const RunContext& own) {
        update::Scratch scratch;
        std::copy_n(accumulator_.load(own, begin, size, scratch.data()), size,
                    sum);
      });
      return;
    }
    const size_t half = first + std::bit_ceil(last - first) / 2;
    update::Scratch other;
    add_up(context, begin, size, first, half, sum);
    add_up(context, begin, size, half, last, other.data());
    for (int64_t i = 0; i < size; ++i) sum[i] += other[static_cast<size_t>(i)];
  }
  void store(const RunContext& context, int64_t begin, int64_t size,
             const float* sum) const {
    on_replica(context, replicas_.front(), [&](const RunContext& own) {
      update::Scratch scratch;
      float* values = accumulator_.space(own, begin, scratch.data());
      std::copy_n(sum, size, values);
      accumulator_.store(own, begin, size, values);
    });
  }

  std::vector<int64_t> replicas_;
  int64_t numel_;
  update::Target accumulator_;
  int64_t start_ = 0;
};

// The replicas of each group; one group of one replica if nothing is said.
std::vector<std::vector<int64_t>> members_of(
    const std::vector<int64_t>& groups) {
  std::vector<std::vector<int64_t>> members;
  for (size_t r = 0; r < groups.size(); ++r) {
    const auto group = static_cast<size_t>(groups[r]);
    if (group == members.size()) members.emplace_back();
    members.at(group).push_back(static_cast<int64_t>(r));
  }
  return members;
}

class AllReduce final : public Kernel {
 public:
  explicit AllReduce(const OpView& op) {
    const auto& groups = op.attribute<std::vector<int64_t>>("groups");
    const std::vector<graph::Op> parts = update::split_into_parts(op);
    const size_t num_replicas = groups.size() / parts.size();
    for (size_t i = 0; i < parts.size(); ++i) {
      const auto first =
          groups.begin() + static_cast<std::ptrdiff_t>(i * num_replicas);
      const std::vector<int64_t> own(
          first, first + static_cast<std::ptrdiff_t>(num_replicas));
      for (const std::vector<int64_t>& members : members_of(own)) {
        reductions_.emplace_back(OpView(op.graph(), parts[i]), members);
        reductions_.back().begin_at(numel_);
        numel_ += reductions_.back().numel();
        blocks_.add(reductions_.back().numel());
      }
    }
  }

  void run(const RunContext& context) override {
    float* numbers = nullptr;
    if (context.exchange != nullptr) {
      const std::span<float> all = context.exchange->numbers();
      check_internal(std::ssize(all) == numel_, "all_reduce: the exchange has ",
                     all.size(), " numbers instead of ", numel_);
      numbers = all.data();
    } else if (context.of_replicas.empty()) {
      return;
    }
    blocks_.for_each([&](size_t i, int64_t begin, int64_t size) {
      reductions_[i].add_up(context, begin, size, numbers);
    });
    if (numbers == nullptr) return;
    context.exchange->sum();
    blocks_.for_each([&](size_t i, int64_t begin, int64_t size) {
      reductions_[i].take(context, begin, size, numbers);
    });
  }

 private:
  std::vector<Reduction> reductions_;
  update::Blocks blocks_;
  int64_t numel_ = 0;
};

std::vector<TensorType> reduced_types(const OpCall& op) {
  const size_t num_groups = op.attribute<std::vector<int64_t>>("groups").size();
  op.require(num_groups > 0 && num_groups % op.num_inputs() == 0,
             "groups has the group of each replica, for each input");
  std::vector<TensorType> types;
  for (size_t i = 0; i < op.num_inputs(); ++i) {
    types.push_back(op.input_type(i));
  }
  return types;
}

}  // namespace

extern const OpDef kAllReduce{
    .name = "all_reduce",
    .schema =
        "all_reduce[parameters](Tensor(a!){floats} accumulator, *, "
        "int{0..}[] groups, int{1..} parameters=1, int{0..}? stream) -> "
        "Tensor(a!) accumulator",
    .family = "update",
    .shape = reduced_types,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<AllReduce>(op);
    },
    .work = no_arithmetic,
    .layer = true,
    .only_overflows = true,
    .calls_host = true,
};

}  // namespace popsim::ops
