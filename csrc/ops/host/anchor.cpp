// Copies a tensor to the host during a run: model outputs and anchors.
//
// A return buffer has one entry per micro-batch that its mode keeps, in the
// order device iteration, accumulation step. A tensor written once per weight
// update stands for all accumulation steps of its device iteration.
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <cstring>

#include "ops/op_def.h"
#include "ops/operands/aten_types.h"

namespace popsim::ops {
namespace {

struct AnchorSpec {
  std::string mode;
  int64_t period;
  int64_t device_iterations;
  int64_t accumulation_steps;
  int64_t buffer;
  bool per_update;
  DType dtype;  // of the return buffer
};

class AnchorKernel final : public Kernel {
 public:
  explicit AnchorKernel(const OpView& op)
      : source_(op.input_id(0)),
        spec_{op.attribute<std::string>("mode"),
              op.attribute<int64_t>("period"),
              op.attribute<int64_t>("device_iterations"),
              op.attribute<int64_t>("accumulation_steps"),
              op.attribute<int64_t>("buffer"),
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
    const int64_t d = cursor.device_iteration;
    const int64_t first = spec_.per_update ? 0 : cursor.accumulation_step;
    const int64_t last =
        spec_.per_update ? spec_.accumulation_steps - 1 : first;
    if (spec_.mode == "All") {
      store(context, d * spec_.accumulation_steps + first, last - first + 1);
    } else if (spec_.mode == "EveryN") {
      if ((d + 1) % spec_.period != 0) return;
      store(context, d / spec_.period * spec_.accumulation_steps + first,
            last - first + 1);
    } else if (spec_.mode == "Final") {
      if (is_last(d, last)) store(context, 0, 1);
    } else {
      add(context, d == 0 && first == 0, is_last(d, last), last - first + 1);
    }
  }

 private:
  [[nodiscard]] bool is_last(int64_t device_iteration,
                             int64_t accumulation_step) const {
    return device_iteration == spec_.device_iterations - 1 &&
           accumulation_step == spec_.accumulation_steps - 1;
  }

  [[nodiscard]] at::Tensor entry(const RunContext& context,
                                 int64_t index) const {
    auto* start = static_cast<char*>(context.return_buffer(spec_.buffer));
    return at::from_blob(start + index * entry_bytes_, shape_,
                         to_scalar_type(spec_.dtype));
  }

  void store(const RunContext& context, int64_t index, int64_t count) const {
    auto* start = static_cast<char*>(context.return_buffer(spec_.buffer));
    for (int64_t i = index; i < index + count; ++i) {
      if (plain_copy_) {
        std::memcpy(start + i * entry_bytes_, context.data(source_),
                    static_cast<size_t>(entry_bytes_));
      } else {
        entry(context, i).copy_(context.tensor(source_));
      }
    }
  }

  void add(const RunContext& context, bool first, bool last, int64_t times) {
    if (first) sum_.zero_();
    // In double (or int64): summing many micro-batches must not round away
    // what each of them adds.
    sum_.add_(context.tensor(source_).to(sum_.scalar_type()), times);
    if (last) entry(context, 0).copy_(sum_);
  }

  graph::TensorId source_;
  AnchorSpec spec_;
  Shape shape_;
  int64_t entry_bytes_;
  bool plain_copy_;
  at::Tensor sum_;
};

}  // namespace

extern const OpDef kAnchor{
    .name = "anchor",
    .schema =
        "anchor(Tensor x, *, str mode, int period, "
        "int device_iterations, int accumulation_steps, int buffer, "
        "bool per_update, str dtype) -> ()",
    .shape = [](const OpView&) { return std::vector<TensorType>{}; },
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<AnchorKernel>(op);
    },
};

}  // namespace popsim::ops
