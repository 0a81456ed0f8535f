// Where a run is: the numbers of its device iteration, counted over all runs,
// and of the micro-batch in it.
#include "ops/op_def.h"
#include "ops/work.h"

namespace popsim::ops {
namespace {

class PositionKernel final : public Kernel {
 public:
  explicit PositionKernel(const OpView& op) : out_(op.output_id(0)) {}

  void run(const RunContext& context) override {
    auto* out = context.data<int64_t>(out_);
    out[0] = context.iterations_before + context.cursor.device_iteration;
    out[1] = context.cursor.accumulation_step;
  }

 private:
  graph::TensorId out_;
};

std::vector<TensorType> position_type(const OpCall& op) {
  op.require(op.op().phase != graph::Phase::kSetup,
             "the op runs in every run, not in the setup phase");
  return {{DType::kInt64, {2}}};
}

}  // namespace

extern const OpDef kPosition{
    .name = "position",
    .schema = "position() -> Tensor",
    .family = "host",
    .shape = position_type,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<PositionKernel>(op);
    },
    .work = [](const OpView&) -> std::vector<graph::Work> {
      return {graph::Host{16}};
    },
};

}  // namespace popsim::ops
