// Runs one of two bodies; a value that the program computes chooses which one.
#include "ops/body.h"
#include "ops/control/types.h"

namespace popsim::ops {
namespace {

using graph::TensorId;

class Branch final : public Kernel {
 public:
  explicit Branch(const OpView& op)
      : if_true_(op.body(0)),
        if_false_(op.body(1)),
        condition_(op.input_id(0)),
        inputs_(op.op().inputs.begin() + 1, op.op().inputs.end()),
        outputs_(op.op().outputs) {}

  void run(const RunContext& context) override {
    BodyRunner& body = *context.data<bool>(condition_) ? if_true_ : if_false_;
    for (size_t i = 0; i < inputs_.size(); ++i) {
      body.bind_input(i, context.data(inputs_[i]));
    }
    for (size_t i = 0; i < outputs_.size(); ++i) {
      body.bind_result(i, context.data(outputs_[i]));
    }
    body.run(context, context.cursor.step);
  }

 private:
  BodyRunner& if_true_;
  BodyRunner& if_false_;
  TensorId condition_;
  std::vector<TensorId> inputs_;
  std::vector<TensorId> outputs_;
};

std::vector<TensorType> branch_types(const OpCall& op) {
  const std::vector<BodyTypes> bodies = body_types(op, 2);
  op.require(op.input(0).numel() == 1, "the condition has one value");
  for (const BodyTypes& body : bodies) {
    op.require(
        body.inputs.size() + 1 == op.num_inputs() &&
            body.results.size() == bodies[0].results.size(),
        "both bodies take all inputs and return the same number of results");
    for (size_t i = 0; i < body.inputs.size(); ++i) {
      op.require(is_same(op.input_type(i + 1), body.inputs[i]), "input ", i + 1,
                 " has the type that the bodies take");
    }
    for (size_t i = 0; i < body.results.size(); ++i) {
      op.require(is_same(body.results[i], bodies[0].results[i]),
                 "both bodies return the same type of result ", i);
    }
  }
  op.require(op.op().outputs.size() == bodies[0].results.size(),
             "the op has an output for each result");
  return bodies[0].results;
}

double flops_of(const std::vector<graph::Work>& all) {
  double sum = 0;
  for (const graph::Work& work : all) sum += graph::flops(work);
  return sum;
}

// The work of the body that has more.
std::vector<graph::Work> branch_work(const OpView& op) {
  auto if_true = work_of_body(*op.op().bodies[0], 1);
  auto if_false = work_of_body(*op.op().bodies[1], 1);
  return flops_of(if_true) < flops_of(if_false) ? if_false : if_true;
}

}  // namespace

extern const OpDef kBranch{
    .name = "branch",
    .schema = "branch(Tensor{bool} condition, Tensor[] values) -> Tensor[]",
    .family = "control",
    .shape = branch_types,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<Branch>(op);
    },
    .work = branch_work,
};

}  // namespace popsim::ops
