// An op that the project does not have, in one entry: tests/ops/test_new_op.py
// builds the library with it.
#include <memory>

#include "ops/op_def.h"
#include "ops/work.h"
#include "threads/tasks.h"

namespace popsim::ops {
namespace {

class Negate final : public Kernel {
 public:
  explicit Negate(const OpView& op)
      : x_(op.input_id(0)),
        out_(op.output_id(0)),
        shares_(threads::elements(op.output(0).numel()), op.output(0).numel()) {
  }

  void run(const RunContext& context) override {
    const auto* x = context.data<float>(x_);
    auto* out = context.data<float>(out_);
    shares_.run([&](int64_t /*share*/, threads::Range range) {
      for (int64_t i = range.begin; i < range.end; ++i) out[i] = -x[i];
    });
  }

 private:
  graph::TensorId x_;
  graph::TensorId out_;
  threads::Shares shares_;
};

std::vector<TensorType> negate_type(const OpCall& op) {
  op.require_contiguous(0);
  return {op.input_type(0)};
}

}  // namespace

extern const OpDef kNegate{
    .name = "negate",
    .schema = "negate(Tensor{float32} x) -> Tensor",
    .family = "layout",
    .shape = negate_type,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<Negate>(op);
    },
    .work = elementwise<1>,
    .elementwise = true,
};

}  // namespace popsim::ops
