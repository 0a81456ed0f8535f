// Copies a tensor to the host during a run: model outputs and anchors.
//
// A return buffer has one entry per micro-batch that its mode keeps, in the
// order device iteration, accumulation step. A tensor written once per weight
// update stands for all accumulation steps of its device iteration.
#include "ops/host/anchor.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <cstring>

#include "ops/operands/aten_types.h"
#include "ops/work.h"

namespace popsim::ops {
namespace {

struct AnchorSpec {
  std::string mode;
  int64_t period;
  int64_t buffer;
  bool per_update;
  DType dtype;  // of the return buffer
};

class AnchorKernel final : public Kernel {
 public:
  explicit AnchorKernel(const OpView& op)
      : source_(op.input_id(0)),
        spec_{op.attribute<std::string>("mode"),
              op.attribute<int64_t>("period"), op.attribute<int64_t>("buffer"),
              op.attribute<bool>("per_update"),
              dtype_from_name(op.attribute<std::string>("dtype"))},
        shape_(op.input(0).shape),
        entry_bytes_(op.input(0).numel() * size_in_bytes(spec_.dtype)),
        plain_copy_(op.input(0).contiguous() &&
                    op.input(0).dtype == spec_.dtype) {
    if (spec_.mode == "Sum") {
      const at::ScalarType type = is_floating(spec_.dtype)
                                      ? at::ScalarType::Double
                                      : at::ScalarType::Long;
      sum_ = at::zeros(shape_, type);
    }
  }

  std::vector<graph::TensorId> at_tensors() const override { return {source_}; }

  void run(const RunContext& context) override {
    const Cursor& cursor = context.cursor;
    const auto [iterations, steps] = context.loop;
    const int64_t d = cursor.device_iteration;
    const int64_t first = spec_.per_update ? 0 : cursor.accumulation_step;
    const int64_t last = spec_.per_update ? steps - 1 : first;
    const bool is_last = d == iterations - 1 && last == steps - 1;
    if (spec_.mode == "All") {
      store(context, d * steps + first, last - first + 1);
    } else if (spec_.mode == "EveryN") {
      if ((d + 1) % spec_.period != 0) return;
      store(context, d / spec_.period * steps + first, last - first + 1);
    } else if (spec_.mode == "Final") {
      if (is_last) store(context, 0, 1);
    } else {
      add(context, d == 0 && first == 0, is_last, last - first + 1);
    }
  }

 private:
  [[nodiscard]] void* entry(const RunContext& context, int64_t index) const {
    return context.sink(spec_.buffer).entry(index, entry_bytes_);
  }

  // The entry seen as a tensor, to be converted into.
  [[nodiscard]] at::Tensor target(const RunContext& context,
                                  int64_t index) const {
    return at::from_blob(entry(context, index), shape_,
                         to_scalar_type(spec_.dtype));
  }

  void store(const RunContext& context, int64_t index, int64_t count) const {
    for (int64_t i = index; i < index + count; ++i) {
      if (plain_copy_) {
        std::memcpy(entry(context, i), context.data(source_),
                    static_cast<size_t>(entry_bytes_));
      } else {
        target(context, i).copy_(context.tensor(source_));
      }
    }
  }

  void add(const RunContext& context, bool first, bool last, int64_t times) {
    if (first) sum_.zero_();
    // In double (or int64): summing many micro-batches must not round away
    // what each of them adds.
    sum_.add_(context.tensor(source_).to(sum_.scalar_type()), times);
    if (last) target(context, 0).copy_(sum_);
  }

  graph::TensorId source_;
  AnchorSpec spec_;
  Shape shape_;
  int64_t entry_bytes_;
  bool plain_copy_;
  at::Tensor sum_;
};

std::vector<TensorType> anchor_types(const OpCall& op) {
  const graph::Phase phase = op.op().phase;
  op.require(phase != graph::Phase::kSetup, "it runs with every run");
  op.require(
      op.attribute<bool>("per_update") == (phase == graph::Phase::kUpdate),
      "per_update says whether it runs once for each update");
  return {};
}

std::vector<graph::Work> work(const OpView& op) {
  return {graph::Host{op.input(0).bytes()}};
}

}  // namespace

Filled filled_by(const OpView& op, LoopCounts loop) {
  const auto& mode = op.attribute<std::string>("mode");
  const auto [iterations, steps] = loop;
  int64_t entries = 1;
  if (mode == "All") entries = iterations * steps;
  if (mode == "EveryN") {
    entries = iterations / op.attribute<int64_t>("period") * steps;
  }
  return {op.attribute<int64_t>("buffer"),
          dtype_from_name(op.attribute<std::string>("dtype")),
          entries * op.input(0).numel()};
}

extern const OpDef kAnchor{
    .name = "anchor",
    .schema =
        "anchor(Tensor x, *, str{All, EveryN, Final, Sum} mode, "
        "int{1..} period, int{0..} buffer, bool per_update, dtype dtype) -> ()",
    .family = "host",
    .shape = anchor_types,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<AnchorKernel>(op);
    },
    .work = work,
    .exact = true,
};

}  // namespace popsim::ops
