// Copies a tensor to the host during a run: model outputs and anchors.
//
// A return buffer has one entry for each micro-batch that its mode keeps,
// ordered by device iteration, then by accumulation step, then by replica. A
// tensor that is written once per weight update counts for all accumulation
// steps of its device iteration.
#include "ops/host/anchor.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <string_view>

#include "ops/operands/aten_types.h"
#include "ops/work.h"
#include "threads/tasks.h"

namespace popsim::ops {
namespace {

// PyTorch copies more elements than these with OpenMP's threads.
constexpr int64_t kOnOneThread = 1 << 15;

// Decides which micro-batches of a run have an entry in the return buffer.
// popsim_torch/anchors.py has the same rule, in `kept_micro_batches`.
class Kept {
 public:
  explicit Kept(const OpView& op)
      : per_step_(is(op, "All") || is(op, "EveryN")),
        period_(is(op, "EveryN") ? op.attribute<int64_t>("period") : 1) {}

  [[nodiscard]] int64_t num_entries(LoopCounts loop) const {
    if (!per_step_) return loop.replicas;
    return std::max<int64_t>(1, loop.device_iterations / period_) *
           loop.gradient_accumulation * loop.replicas;
  }

  // Of a program with one replica: the first entry of the accumulation steps
  // from `first` to `last` of the current device iteration; -1 if step `last`
  // has no entry.
  [[nodiscard]] int64_t entry(const RunContext& context, int64_t first,
                              int64_t last) const {
    const auto [iterations, steps, replicas] = context.loop;
    const int64_t d = context.cursor.device_iteration;
    if (!per_step_) return d == iterations - 1 && last == steps - 1 ? 0 : -1;
    // A period longer than a run continues from one run to the next.
    const bool goes_on = period_ > iterations;
    const int64_t before = goes_on ? context.iterations_before : 0;
    if ((before + d + 1) % period_ != 0) return -1;
    return (goes_on ? 0 : d / period_) * steps + first;
  }

  // Whether each accumulation step has its own entry.
  [[nodiscard]] bool per_step() const { return per_step_; }

 private:
  static bool is(const OpView& op, std::string_view mode) {
    return op.attribute<std::string>("mode") == mode;
  }

  bool per_step_;
  int64_t period_;  // device iterations
};

// Wide enough that rounding does not lose the contributions of single
// micro-batches.
at::ScalarType sum_type(DType dtype) {
  if (is_complex(dtype)) return at::ScalarType::ComplexDouble;
  return is_floating(dtype) ? at::ScalarType::Double : at::ScalarType::Long;
}

class AnchorKernel final : public Kernel {
 public:
  explicit AnchorKernel(const OpView& op)
      : source_(op.input_id(0)),
        kept_(op),
        buffer_(op.attribute<int64_t>("buffer")),
        per_update_(op.attribute<bool>("per_update")),
        dtype_(dtype_from_name(op.attribute<std::string>("dtype"))),
        shape_(op.input(0).shape),
        entry_bytes_(op.input(0).numel() * size_in_bytes(dtype_)),
        plain_copy_(op.input(0).contiguous() && op.input(0).dtype == dtype_) {
    if (op.attribute<std::string>("mode") == "Sum") {
      sum_ = at::zeros(shape_, sum_type(dtype_));
    }
  }

  std::vector<graph::TensorId> at_tensors() const override { return {source_}; }

  void run(const RunContext& context) override {
    const int64_t step = context.cursor.accumulation_step;
    const int64_t first = per_update_ ? 0 : step;
    const int64_t last =
        per_update_ ? context.loop.gradient_accumulation - 1 : step;
    const int64_t entry = kept_.entry(context, first, last);
    if (sum_.defined()) {
      const bool begins = context.cursor.device_iteration == 0 && first == 0;
      add(context, begins, entry, last - first + 1);
    } else if (entry >= 0) {
      store(context, entry, kept_.per_step() ? last - first + 1 : 1);
    }
  }

 private:
  [[nodiscard]] void* place(const RunContext& context, int64_t index) const {
    const int64_t of_replica =
        index * context.loop.replicas + context.cursor.replica;
    return context.sink(buffer_).entry(of_replica, entry_bytes_);
  }

  // The entry as a tensor; values are converted into it.
  [[nodiscard]] at::Tensor target(const RunContext& context,
                                  int64_t index) const {
    return at::from_blob(place(context, index), shape_, to_scalar_type(dtype_));
  }

  void store(const RunContext& context, int64_t index, int64_t count) const {
    for (int64_t i = index; i < index + count; ++i) {
      if (plain_copy_) {
        std::memcpy(place(context, i), context.data(source_),
                    static_cast<size_t>(entry_bytes_));
      } else {
        const at::Tensor& source = context.tensor(source_);
        const auto copy = [&] { target(context, i).copy_(source); };
        if (source.numel() > kOnOneThread) {
          threads::run_shared(copy);
        } else {
          copy();
        }
      }
    }
  }

  void add(const RunContext& context, bool begins, int64_t entry,
           int64_t times) {
    if (begins) sum_.zero_();
    sum_.add_(context.tensor(source_).to(sum_.scalar_type()), times);
    if (entry >= 0) target(context, entry).copy_(sum_);
  }

  graph::TensorId source_;
  Kept kept_;
  int64_t buffer_;
  bool per_update_;
  DType dtype_;  // of the return buffer
  Shape shape_;
  int64_t entry_bytes_;
  bool plain_copy_;
  at::Tensor sum_;  // undefined in modes other than Sum
};

std::vector<TensorType> anchor_types(const OpCall& op) {
  const graph::Phase phase = op.op().phase;
  op.require(phase != graph::Phase::kSetup,
             "the op runs in every run, not in the setup phase");
  op.require(
      op.attribute<bool>("per_update") == (phase == graph::Phase::kUpdate),
      "per_update says whether it runs once for each update");
  return {};
}

std::vector<graph::Work> anchor_work(const OpView& op) {
  return {graph::Host{op.input(0).bytes()}};
}

}  // namespace

Return return_of(const OpView& op, LoopCounts loop) {
  const int64_t num_entries = Kept(op).num_entries(loop);
  return {op.input_id(0), num_entries,
          shape_of_entries(op.input(0).shape, num_entries),
          dtype_from_name(op.attribute<std::string>("dtype")),
          op.attribute<bool>("keep")};
}

Shape shape_of_entries(const Shape& entry, int64_t num_entries) {
  if (entry.empty()) return num_entries == 1 ? Shape{} : Shape{num_entries};
  Shape shape = entry;
  shape.front() *= num_entries;
  return shape;
}

extern const OpDef kAnchor{
    .name = "anchor",
    .schema =
        "anchor(Tensor x, *, str{All, EveryN, Final, Sum} mode, "
        "int{1..} period, int{0..} buffer, bool keep, bool per_update, "
        "dtype dtype) -> ()",
    .family = "host",
    .shape = anchor_types,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<AnchorKernel>(op);
    },
    .work = anchor_work,
    .exact = true,
};

}  // namespace popsim::ops
