#include "runtime/executable.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/check.h"
#include "ops/operands/aten_types.h"

namespace popsim::runtime {
namespace {

using graph::Phase;
using graph::TensorId;
using schedule::Action;
using schedule::ActionKind;

// Training repeats the action list once per device iteration; inference has no
// update to wait for, so one list covers all device iterations.
schedule::Config schedule_config(const graph::Graph& graph,
                                 const RunConfig& config) {
  return {
      graph.num_stages(),
      config.training ? config.gradient_accumulation : config.device_iterations,
      config.training};
}

UserError failure(const graph::Op& op, const char* reason) {
  return UserError(
      join("while running '", op.name, "' (", op.kind, "): ", reason));
}

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

// Adds up the time of every op, run by run.
class Executable::Stopwatch {
 public:
  explicit Stopwatch(const Executable& executable)
      : first_(executable.graph_.ops().data()),
        ops_(executable.graph_.ops().size()) {}

  void start() { last_ = Clock::now(); }
  // The op has just run. One reading of the clock ends an op and starts the
  // next.
  void lap(const graph::Op& op) {
    const Clock::time_point now = Clock::now();
    Laps& laps = ops_[static_cast<size_t>(&op - first_)];
    laps.seconds += std::chrono::duration<double>(now - last_).count();
    ++laps.executions;
    last_ = now;
  }
  void end_run() {
    for (Laps& laps : ops_) {
      laps.runs.push_back(laps.seconds);
      laps.seconds = 0;
    }
  }
  [[nodiscard]] std::vector<OpTime> times() {
    std::vector<OpTime> times;
    for (size_t i = 0; i < ops_.size(); ++i) {
      Laps& laps = ops_[i];
      if (laps.executions == 0) continue;
      const auto num_runs = static_cast<int64_t>(laps.runs.size());
      const auto middle = laps.runs.begin() + num_runs / 2;
      std::nth_element(laps.runs.begin(), middle, laps.runs.end());
      times.push_back(
          {static_cast<int64_t>(i), laps.executions / num_runs, *middle});
    }
    return times;
  }

 private:
  using Clock = std::chrono::steady_clock;
  struct Laps {
    double seconds = 0;
    int64_t executions = 0;
    std::vector<double> runs;
  };

  const graph::Op* first_;
  std::vector<Laps> ops_;
  Clock::time_point last_;
};

class Executable::Context final : public ops::RunContext {
 public:
  Context(const Executable& executable, Stopwatch* stopwatch)
      : stopwatch(stopwatch), memory_(*executable.memory_) {
    pointers = memory_.pointers();
    sinks = executable.sinks_.data();
    loop = executable.loop_counts();
    seed = executable.seed_;
  }

  const at::Tensor& tensor(TensorId id) const override {
    return memory_.tensor(id);
  }

  Stopwatch* const stopwatch;  // null: ops are not timed

 private:
  const DeviceMemory& memory_;
};

Executable::Executable(graph::Graph graph, const RunConfig& config,
                       std::vector<ReturnSpec> returns)
    : graph_(std::move(graph)), config_(config), returns_(std::move(returns)) {
  graph::verify(graph_);
  const schedule::Config schedule = schedule_config(graph_, config_);
  schedule_ = schedule::generate(config_.schedule, schedule);
  schedule::validate(schedule_, schedule);
  const std::vector<memory::Block> blocks = memory::make_blocks(graph_);
  plan_ = memory::plan_arena(
      graph_, blocks, memory::live_ranges(graph_, blocks, schedule_),
      [](const graph::Op& op) { return ops::find_op(op.kind).reuses_input; });
  memory_ = std::make_unique<DeviceMemory>(graph_, plan_);
  prepare_kernels();
  build_blocks(blocks);
  for (size_t i = 0; i < graph_.tensors().size(); ++i) {
    const graph::Tensor& t = graph_.tensors()[i];
    if (t.kind == graph::TensorKind::kInput) {
      inputs_.push_back({static_cast<TensorId>(i), t.bytes()});
    }
  }
  for (const ReturnSpec& spec : returns_) {
    kept_.push_back(spec.keep
                        ? at::zeros(spec.shape, ops::to_scalar_type(spec.dtype))
                        : at::Tensor());
  }
  buffers_.resize(returns_.size());
  for (Buffer& buffer : buffers_) sinks_.push_back(&buffer);
}

ops::LoopCounts Executable::loop_counts() const {
  return {config_.device_iterations,
          config_.training ? config_.gradient_accumulation : 1};
}

void Executable::prepare_kernels() {
  kernels_.reserve(graph_.ops().size());
  for (size_t i = 0; i < graph_.ops().size(); ++i) {
    const ops::OpView view(graph_, graph_.ops()[i], static_cast<int64_t>(i));
    ops::check_types(view);
    kernels_.push_back(ops::find_op(view.op().kind).prepare(view));
    for (const TensorId id : kernels_.back()->at_tensors()) {
      memory_->make_tensor(id);
    }
  }
}

void Executable::build_blocks(const std::vector<memory::Block>& blocks) {
  const auto instruction = [this](int64_t index) {
    const auto i = static_cast<size_t>(index);
    return Instruction{kernels_[i].get(), &graph_.ops()[i]};
  };
  for (size_t i = 0; i < graph_.ops().size(); ++i) {
    if (graph_.ops()[i].phase == Phase::kSetup) {
      setup_.push_back(instruction(static_cast<int64_t>(i)));
    }
  }
  const auto stages = static_cast<size_t>(graph_.num_stages());
  forward_.resize(stages);
  backward_.resize(stages);
  for (const memory::Block& block : blocks) {
    const auto stage = static_cast<size_t>(block.stage);
    std::vector<Instruction>& target =
        block.phase == Phase::kForward    ? forward_[stage]
        : block.phase == Phase::kBackward ? backward_[stage]
                                          : update_;
    for (const int64_t index : block.ops) target.push_back(instruction(index));
  }
}

const std::vector<Executable::Instruction>& Executable::block(
    const Action& action) const {
  switch (action.kind) {
    case ActionKind::kForward:
      return forward_[static_cast<size_t>(action.stage)];
    case ActionKind::kBackward:
      return backward_[static_cast<size_t>(action.stage)];
    case ActionKind::kUpdate:
      return update_;
  }
  throw InternalError("executable: not an action");
}

void Executable::execute(const Instruction& instruction,
                         const ops::RunContext& context) {
  try {
    instruction.kernel->run(context);
  } catch (const InternalError&) {
    throw;
  } catch (const c10::Error& error) {
    throw failure(*instruction.op, error.what_without_backtrace());
  } catch (const std::exception& error) {
    throw failure(*instruction.op, error.what());
  }
}

void Executable::execute(const std::vector<Instruction>& block,
                         const Context& context) {
  if (context.stopwatch == nullptr) {
    for (const Instruction& instruction : block) execute(instruction, context);
    return;
  }
  context.stopwatch->start();
  for (const Instruction& instruction : block) {
    execute(instruction, context);
    context.stopwatch->lap(*instruction.op);
  }
}

void Executable::load() {
  const c10::InferenceMode no_autograd;
  execute(setup_, Context(*this, nullptr));
}

void Executable::check_inputs(const std::vector<at::Tensor>& inputs) const {
  check_user(inputs.size() == inputs_.size(), "run: ", inputs.size(),
             " inputs given, the program has ", inputs_.size());
  const int64_t factor =
      config_.device_iterations * config_.gradient_accumulation;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const graph::Tensor& t = graph_.tensor(inputs_[i].id);
    check_user(inputs[i].is_contiguous() && inputs[i].device().is_cpu() &&
                   inputs[i].scalar_type() == ops::to_scalar_type(t.dtype) &&
                   inputs[i].numel() == t.numel() * factor,
               "run: input '", t.name, "' must be a contiguous CPU tensor of ",
               name_of(t.dtype), " with ", t.numel() * factor, " elements (",
               factor, " micro-batches of shape ", to_string(t.shape), ")");
  }
}

void Executable::bind_inputs(const std::vector<at::Tensor>& inputs,
                             int64_t micro_batch) {
  for (size_t i = 0; i < inputs_.size(); ++i) {
    auto* start = static_cast<char*>(inputs[i].data_ptr());
    memory_->bind(inputs_[i].id, start + micro_batch * inputs_[i].bytes);
  }
}

void Executable::run_action(const Action& action,
                            const std::vector<at::Tensor>& inputs,
                            Context& context, int64_t iteration,
                            int64_t first_step) {
  const int64_t accumulation = config_.gradient_accumulation;
  if (action.kind == ActionKind::kUpdate) {
    context.cursor = {iteration, accumulation - 1, step_ - 1};
  } else {
    const int64_t mb = action.micro_batch;
    context.cursor = {config_.training ? iteration : mb,
                      config_.training ? mb : 0, first_step + mb};
    bind_inputs(inputs, iteration * accumulation + mb);
    memory_->select_slots(mb);
    step_ = std::max(step_, first_step + mb + 1);
  }
  execute(block(action), context);
}

void Executable::run_iteration(const std::vector<at::Tensor>& inputs,
                               Context& context, int64_t iteration) {
  const int64_t first_step = step_;
  for (const schedule::Stretch& stretch : schedule_) {
    for (int64_t time = 0; time < stretch.times; ++time) {
      for (const Action& action : stretch.actions) {
        run_action(schedule::further(action, time), inputs, context, iteration,
                   first_step);
      }
    }
  }
}

std::vector<at::Tensor> Executable::run(const std::vector<at::Tensor>& inputs,
                                        Stopwatch* stopwatch) {
  const Busy busy(running_);
  check_inputs(inputs);
  std::vector<at::Tensor> results;
  for (size_t i = 0; i < returns_.size(); ++i) {
    const ReturnSpec& spec = returns_[i];
    results.push_back(
        spec.keep ? at::Tensor()
                  : at::empty(spec.shape, ops::to_scalar_type(spec.dtype)));
    buffers_[i].point_at(spec.keep ? kept_[i] : results.back());
  }
  const c10::InferenceMode no_autograd;
  Context context(*this, stopwatch);
  const int64_t iterations = config_.training ? config_.device_iterations : 1;
  for (int64_t i = 0; i < iterations; ++i) run_iteration(inputs, context, i);
  return results;
}

std::vector<OpTime> Executable::profile(const std::vector<at::Tensor>& inputs,
                                        int64_t repeats) {
  check_user(repeats > 0, "profile: repeats must be at least 1, got ", repeats);
  Stopwatch stopwatch(*this);
  for (int64_t i = 0; i < repeats; ++i) {
    run(inputs, &stopwatch);
    stopwatch.end_run();
  }
  return stopwatch.times();
}

void Executable::write(TensorId id, const at::Tensor& value) {
  const graph::Tensor& t = graph_.tensor(id);
  const at::Tensor target = at::from_blob(
      memory_->pointer(id), t.shape, t.strides, ops::to_scalar_type(t.dtype));
  check_user(value.numel() == t.numel(), "write: '", t.name, "' has shape ",
             to_string(t.shape), ", the value has ", value.numel(),
             " elements");
  target.copy_(value.reshape(t.shape));
}

at::Tensor Executable::read(TensorId id) const {
  const graph::Tensor& t = graph_.tensor(id);
  return at::from_blob(memory_->pointer(id), t.shape, t.strides,
                       ops::to_scalar_type(t.dtype))
      .clone();
}

at::Tensor Executable::read_kept(int64_t index) const {
  const at::Tensor& buffer = kept_.at(static_cast<size_t>(index));
  check_internal(buffer.defined(), "read_kept: return ", index,
                 " is not kept on the device");
  return buffer.clone();
}

}  // namespace popsim::runtime
