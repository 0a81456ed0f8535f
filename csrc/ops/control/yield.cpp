// Ends a body: the inputs of this op are the results of the body.
#include "ops/op_def.h"
#include "ops/work.h"

namespace popsim::ops {
namespace {

// There is nothing to do: the ops have written the results to the right places.
class Yield final : public Kernel {
 public:
  void run(const RunContext& /*context*/) override {}
};

}  // namespace

extern const OpDef kYield{
    .name = "yield",  // graph::kYield
    .schema = "yield(Tensor[] results) -> ()",
    .family = "control",
    .shape = [](const OpCall& /*op*/) { return std::vector<TensorType>(); },
    .prepare = [](const OpView& /*op*/) -> std::unique_ptr<Kernel> {
      return std::make_unique<Yield>();
    },
    .work = no_arithmetic,
};

}  // namespace popsim::ops
