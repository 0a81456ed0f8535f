// The op that calls a user's operator directly, without Python.
#include <cmath>
#include <optional>
#include <utility>

#include "ops/custom/call.h"
#include "ops/custom/guards.h"
#include "ops/work.h"
#include "threads/tasks.h"

namespace popsim::ops {
namespace {

class CustomKernel final : public Kernel {
 public:
  explicit CustomKernel(const OpView& op)
      : operands_(op.op().inputs), call_(op, op.num_inputs(), op.op().outputs) {
    const popsim_custom_op& entry = custom::operator_of(op);
    is_gradient_ = op.has_attribute("gradient_of");
    function_ = is_gradient_ ? entry.gradient : entry.kernel;
    alone_ = entry.alone != 0;
    operands_.insert(operands_.end(), op.op().outputs.begin(),
                     op.op().outputs.end());
    memory_.resize(operands_.size());
    if (op.attribute<bool>("guarded")) {
      std::vector<size_t> bytes;
      for (const graph::TensorId id : operands_) {
        bytes.push_back(static_cast<size_t>(op.graph().tensor(id).bytes()));
      }
      guards_.emplace(op.num_inputs(), std::move(bytes));
    }
  }

  void run(const RunContext& context) override {
    for (size_t i = 0; i < operands_.size(); ++i) {
      memory_[i] = context.data(operands_[i]);
      call_.set_data(i, memory_[i]);
    }
    if (guards_) guards_->put(call_, memory_);
    int returned = 0;
    if (alone_) {
      threads::run_alone([&] { returned = function_(&call_); });
    } else {
      returned = function_(&call_);
    }
    call_.check(returned, is_gradient_ ? "gradient" : "kernel");
    if (guards_) guards_->take(memory_);
  }

 private:
  std::vector<graph::TensorId> operands_;
  std::vector<void*> memory_;
  custom::Call call_;
  std::optional<custom::Guards> guards_;
  int (*function_)(popsim_call*) = nullptr;
  bool is_gradient_ = false;
  bool alone_ = false;
};

std::vector<TensorType> custom_types(const OpCall& op) {
  try {
    return custom::types_of(op);
  } catch (const UserError& error) {
    // The trace has checked the user's arguments already.
    op.require(false, error.what());
  }
  return {};
}

int64_t counted(const OpView& op, double amount) {
  check_user(std::isfinite(amount) && amount >= 0 && amount < 1e18,
             "the cost of ", op.op(), " is ", amount,
             ": it must be a number of at least 0");
  return std::llround(amount);
}

std::vector<graph::Work> custom_work(const OpView& op) {
  const popsim_custom_op& entry = custom::operator_of(op);
  const auto cost =
      op.has_attribute("gradient_of") ? entry.gradient_cost : entry.cost;
  if (cost == nullptr) return {};
  custom::Call call(op, op.num_inputs(), op.op().outputs);
  popsim_custom_cost given{0, 0};
  call.check(cost(&call, &given), "cost");
  std::vector<graph::Work> work{graph::Elementwise{counted(op, given.flops)}};
  const int64_t bytes = counted(op, given.bytes);
  if (bytes > 0) work.emplace_back(graph::Move{bytes});
  return work;
}

}  // namespace

extern const OpDef kCustom{
    .name = "custom",
    .schema =
        "custom(Tensor{bool, uint8, int8, int16, int32, float16, float32}[] "
        "inputs, *, str domain, str name, int version, str[] attributes, "
        "int[] ints, float[] floats, str[] strings, int{0..}? gradient_of, "
        "bool guarded=False) -> "
        "Tensor{bool, uint8, int8, int16, int32, float16, float32}[]",
    .family = "custom",
    .shape = custom_types,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<CustomKernel>(op);
    },
    .work = custom_work,
    .layer = true,
    .exact = true,
};

}  // namespace popsim::ops
