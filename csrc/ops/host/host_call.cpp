// Calls code of the host with tensors, and gets tensors back.
//
// The code gets copies, which it may keep, change and use for differentiation.
// The device's memory would not allow this.
#include <ATen/core/Tensor.h>
#include <c10/core/InferenceMode.h>

#include <utility>

#include "ops/host_code.h"
#include "ops/op_def.h"
#include "ops/operands/aten_types.h"
#include "ops/work.h"

namespace popsim::ops {
namespace {

class HostCallKernel final : public Kernel {
 public:
  explicit HostCallKernel(const OpView& op)
      : inputs_(op.op().inputs),
        outputs_(op.op().outputs),
        number_(op.attribute<int64_t>("call")),
        gradient_(op.attribute<bool>("gradient")),
        num_results_(op.attribute<std::vector<std::string>>("dtypes").size()) {}

  std::vector<graph::TensorId> at_tensors() const override {
    std::vector<graph::TensorId> ids = inputs_;
    for (const graph::TensorId id : outputs_) {
      if (id != graph::kNoTensor) ids.push_back(id);
    }
    return ids;
  }

  void run(const RunContext& context) override {
    check_user(
        context.host != nullptr,
        "the program calls code of the host, but the run was given none");
    const std::vector<at::Tensor> results = call(context);
    check_internal(results.size() == num_results_,
                   "host_call: ", results.size(), " results instead of ",
                   num_results_);
    for (size_t i = 0; i < outputs_.size(); ++i) {
      if (outputs_[i] == graph::kNoTensor) continue;
      const at::Tensor& target = context.tensor(outputs_[i]);
      check_internal(results[i].sizes() == target.sizes(), "host_call: result ",
                     i, " has the shape ", results[i].sizes(), " instead of ",
                     target.sizes());
      target.copy_(results[i]);
    }
  }

 private:
  // Leaves the inference mode of the run, because autograd refuses tensors made
  // in it.
  [[nodiscard]] std::vector<at::Tensor> call(const RunContext& context) const {
    const c10::InferenceMode ordinary(false);
    std::vector<at::Tensor> operands;
    for (const graph::TensorId id : inputs_) {
      operands.push_back(
          context.tensor(id).clone(at::MemoryFormat::Contiguous));
    }
    return context.host->call(number_, gradient_, std::move(operands));
  }

  std::vector<graph::TensorId> inputs_;
  std::vector<graph::TensorId> outputs_;
  int64_t number_;
  bool gradient_;
  size_t num_results_;
};

std::vector<TensorType> result_types(const OpCall& op) {
  const graph::Phase phase = op.op().phase;
  op.require(
      phase == graph::Phase::kForward || phase == graph::Phase::kBackward,
      "the op runs once for each micro-batch");
  const auto& dtypes = op.attribute<std::vector<std::string>>("dtypes");
  const auto& ranks = op.attribute<std::vector<int64_t>>("ranks");
  const auto& sizes = op.attribute<std::vector<int64_t>>("sizes");
  op.require(ranks.size() == dtypes.size(), "each result has a rank");
  std::vector<TensorType> types;
  auto next = sizes.begin();
  for (size_t i = 0; i < dtypes.size(); ++i) {
    op.require(ranks[i] <= sizes.end() - next, "each axis has a size");
    types.push_back({dtype_from_name(dtypes[i]), {next, next + ranks[i]}});
    next += ranks[i];
  }
  op.require(next == sizes.end(), "each size belongs to an axis");
  return types;
}

std::vector<graph::Work> host_call_work(const OpView& op) {
  int64_t bytes = 0;
  for (size_t i = 0; i < op.num_inputs(); ++i) bytes += op.input(i).bytes();
  for (size_t i = 0; i < op.num_outputs(); ++i) {
    if (op.has_output(i)) bytes += op.output(i).bytes();
  }
  return {graph::Host{bytes}};
}

}  // namespace

extern const OpDef kHostCall{
    .name = "host_call",
    .schema =
        "host_call(Tensor[] x, *, int{0..} call, str id, bool gradient, "
        "dtype[] dtypes, int{0..}[] ranks, int{0..}[] sizes) -> "
        "Tensor?[] results",
    .family = "host",
    .shape = result_types,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<HostCallKernel>(op);
    },
    .work = host_call_work,
    .exact = true,
    .calls_host = true,
};

}  // namespace popsim::ops
