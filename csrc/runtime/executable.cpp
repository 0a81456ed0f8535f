#include "runtime/executable.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <utility>

#include "base/check.h"
#include "ops/operands/aten_types.h"

namespace popsim::runtime {
namespace {

using graph::TensorId;

// Marks an executable as busy for the length of a scope.
class Busy {
 public:
  explicit Busy(std::atomic<bool>& flag) : flag_(flag) {
    check_user(!flag_.exchange(true),
               "this executable is already running on another thread; call it "
               "from one thread at a time");
  }
  Busy(const Busy&) = delete;
  Busy& operator=(const Busy&) = delete;
  ~Busy() { flag_ = false; }

 private:
  std::atomic<bool>& flag_;
};

}  // namespace

Executable::Executable(Plan plan, std::vector<ReturnSpec> returns)
    : plan_(std::move(plan)), stage_(plan_), returns_(std::move(returns)) {
  for (const TensorId id : plan_.inputs()) {
    slices_.emplace_back(plan_.graph().tensor(id).bytes());
  }
  for (const ReturnSpec& spec : returns_) {
    kept_.push_back(spec.keep
                        ? at::zeros(spec.shape, ops::to_scalar_type(spec.dtype))
                        : at::Tensor());
  }
  buffers_.resize(returns_.size());
  for (CallSlice& slice : slices_) sources_.push_back(&slice);
  for (Buffer& buffer : buffers_) sinks_.push_back(&buffer);
}

void Executable::check_inputs(const std::vector<at::Tensor>& inputs) const {
  check_user(inputs.size() == slices_.size(), "run: ", inputs.size(),
             " inputs given, the program has ", slices_.size());
  const ops::LoopCounts loop = plan_.loop();
  const int64_t count = loop.device_iterations * loop.accumulation_steps;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const graph::Tensor& t = plan_.graph().tensor(plan_.inputs()[i]);
    check_user(inputs[i].is_contiguous() && inputs[i].device().is_cpu() &&
                   inputs[i].scalar_type() == ops::to_scalar_type(t.dtype) &&
                   inputs[i].numel() == t.numel() * count,
               "run: input '", t.name, "' must be a contiguous CPU tensor of ",
               name_of(t.dtype), " with ", t.numel() * count, " elements (",
               count, " micro-batches of shape ", to_string(t.shape), ")");
  }
}

std::vector<at::Tensor> Executable::make_results() {
  std::vector<at::Tensor> results;
  for (size_t i = 0; i < returns_.size(); ++i) {
    const ReturnSpec& spec = returns_[i];
    results.push_back(
        spec.keep ? at::Tensor()
                  : at::empty(spec.shape, ops::to_scalar_type(spec.dtype)));
    buffers_[i].point_at(spec.keep ? kept_[i] : results.back());
  }
  return results;
}

std::vector<at::Tensor> Executable::run(const std::vector<at::Tensor>& inputs,
                                        Listener* listener) {
  const Busy busy(running_);
  check_inputs(inputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    slices_[i].point_at(inputs[i].data_ptr());
  }
  std::vector<at::Tensor> results = make_results();
  stage_.run({sources_, sinks_, seed_, listener});
  return results;
}

std::vector<OpTime> Executable::profile(const std::vector<at::Tensor>& inputs,
                                        int64_t repeats) {
  check_user(repeats > 0, "profile: repeats must be at least 1, got ", repeats);
  Stopwatch stopwatch(plan_.graph());
  for (int64_t i = 0; i < repeats; ++i) {
    run(inputs, &stopwatch);
    stopwatch.end_run();
  }
  return stopwatch.times();
}

at::Tensor Executable::memory_of(TensorId id) const {
  const graph::Tensor& t = plan_.graph().tensor(id);
  return at::from_blob(stage_.pointer(id), t.shape, t.strides,
                       ops::to_scalar_type(t.dtype));
}

void Executable::write(TensorId id, const at::Tensor& value) {
  const graph::Tensor& t = plan_.graph().tensor(id);
  check_user(value.numel() == t.numel(), "write: '", t.name, "' has shape ",
             to_string(t.shape), ", the value has ", value.numel(),
             " elements");
  memory_of(id).copy_(value.reshape(t.shape));
}

at::Tensor Executable::read(TensorId id) const { return memory_of(id).clone(); }

at::Tensor Executable::read_kept(int64_t index) const {
  const at::Tensor& buffer = kept_.at(static_cast<size_t>(index));
  check_internal(buffer.defined(), "read_kept: return ", index,
                 " is not kept on the device");
  return buffer.clone();
}

}  // namespace popsim::runtime
