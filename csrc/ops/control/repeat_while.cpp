// Decides whether the run continues with another device iteration or ends after
// this one.
#include "ops/op_def.h"
#include "ops/work.h"

namespace popsim::ops {
namespace {

class RepeatWhile final : public Kernel {
 public:
  explicit RepeatWhile(const OpView& op) : condition_(op.input_id(0)) {}

  void run(const RunContext& context) override {
    *context.ends = !*context.data<bool>(condition_);
  }

 private:
  graph::TensorId condition_;
};

std::vector<TensorType> repeat_while_types(const OpCall& op) {
  op.require(op.op().phase != graph::Phase::kSetup,
             "the op runs in every run, not in the setup phase");
  op.require(op.input(0).dtype == DType::kBool && op.input(0).numel() == 1,
             "the condition is one boolean");
  return {};
}

}  // namespace

extern const OpDef kRepeatWhile{
    .name = "repeat_while",
    .schema = "repeat_while(Tensor condition) -> ()",
    .family = "control",
    .shape = repeat_while_types,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<RepeatWhile>(op);
    },
    .work = [](const OpView& op) -> std::vector<graph::Work> {
      return {graph::Host{op.input(0).bytes()}};
    },
    .in_order = true,
};

}  // namespace popsim::ops
