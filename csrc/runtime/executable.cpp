#include "runtime/executable.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <cstring>
#include <span>
#include <utility>

#include "base/check.h"
#include "ops/operands/aten_types.h"
#include "runtime/closed_memory.h"

namespace popsim::runtime {

using graph::TensorId;

namespace {

// The returns of a program, by position. Throws InternalError unless exactly
// one op writes each return.
std::vector<ops::Return> returns_of(const Plan& plan) {
  std::map<int64_t, ops::Return> found;
  for (const graph::Op& op : plan.graph().ops()) {
    if (op.kind != "anchor") continue;
    const ops::OpView view(plan.graph(), op);
    const auto position = view.attribute<int64_t>("buffer");
    const bool is_new =
        found.emplace(position, ops::return_of(view, plan.loop())).second;
    check_internal(is_new, "returns: ", describe(op), " writes return ",
                   position, ", which another op writes too");
  }
  std::vector<ops::Return> returns;
  for (const auto& [position, filled] : found) {
    check_internal(position == std::ssize(returns),
                   "returns: no op writes return ", returns.size());
    returns.push_back(filled);
  }
  return returns;
}

// Throws UserError unless the queue of each enqueueing op exists and has
// elements of the sizes that the op enqueues for all replicas.
void check_outlets(const graph::Graph& graph,
                   std::span<const std::shared_ptr<ops::Outlet>> outlets,
                   int64_t num_replicas) {
  for (const graph::Op& op : graph.ops()) {
    for (const auto& body : op.bodies) {
      check_outlets(*body, outlets, num_replicas);
    }
    if (op.kind != "enqueue") continue;
    const ops::OpView view(graph, op);
    const auto queue = static_cast<size_t>(view.attribute<int64_t>("queue"));
    check_user(queue < outlets.size(), "connect: ", describe(op),
               " enqueues to queue ", queue, " of ", outlets.size());
    const auto& dtypes = view.attribute<std::vector<std::string>>("dtypes");
    std::vector<int64_t> sizes;
    for (size_t i = 0; i < view.num_inputs(); ++i) {
      sizes.push_back(view.input(i).numel() *
                      size_in_bytes(dtype_from_name(dtypes[i])));
    }
    for (int64_t& size : sizes) size *= num_replicas;
    check_user(
        sizes == outlets[queue]->sizes(), "connect: ", describe(op),
        " enqueues tensors of other sizes than the elements of its queue");
  }
}

}  // namespace

Executable::Executable(std::unique_ptr<const Plan> plan,
                       std::unique_ptr<const Plan> observed)
    : own_plan_(std::move(plan)),
      observed_(std::move(observed)),
      plan_(*own_plan_),
      stage_(plan_, observed_.get()),
      returns_(returns_of(plan_)) {
  place_inputs({}, std::vector<InputPlace>(plan_.inputs().size()));
  for (const ops::Return& made : returns_) {
    kept_.push_back(made.keep
                        ? at::zeros(made.shape, ops::to_scalar_type(made.dtype))
                        : at::Tensor());
  }
  buffers_.resize(returns_.size());
  for (Buffer& buffer : buffers_) sinks_.push_back(&buffer);
  if (plan_.floating_point_checks()) watch_.emplace(plan_.graph());
}

void Executable::check_inputs(const std::vector<at::Tensor>& inputs) const {
  check_user(inputs.size() == slices_.size(), "run: ", inputs.size(),
             " inputs given, the program has ", slices_.size());
  const ops::LoopCounts loop = plan_.loop();
  const int64_t num_all = loop.device_iterations * loop.gradient_accumulation *
                          plan_.replicas().num_inputs();
  size_t next = 0;
  for (size_t i = 0; i < places_.size(); ++i) {
    if (places_[i].feed >= 0) continue;
    const at::Tensor& input = inputs[next++];
    const graph::Tensor& t = plan_.graph().tensor(plan_.inputs()[i]);
    const int64_t count = places_[i].shared ? 1 : num_all;
    check_user(input.is_contiguous() && input.device().is_cpu() &&
                   input.scalar_type() == ops::to_scalar_type(t.dtype) &&
                   input.numel() == t.numel() * count,
               "run: input '", t.name, "' must be a contiguous CPU tensor of ",
               name_of(t.dtype), " with ", t.numel() * count, " elements (",
               count, " micro-batches of shape ", to_string(t.shape), ")");
  }
}

void Executable::connect(std::vector<std::shared_ptr<ops::Outlet>> outlets,
                         std::vector<std::shared_ptr<Inlet>> inlets,
                         const std::vector<InputPlace>& places) {
  const Usage::Copy copy(usage_, "connect");
  check_outlets(plan_.graph(), outlets, plan_.replicas().count);
  if (observed_) {
    check_outlets(observed_->graph(), outlets, plan_.replicas().count);
  }
  place_inputs(std::move(inlets), places);
  once_outlets_.clear();
  if (plan_.checks_numbers()) {
    // Others are those of the observed version, whose reader knows about
    // repeated iterations.
    for (const int64_t queue : plan_.queues()) {
      std::shared_ptr<ops::Outlet>& outlet =
          outlets[static_cast<size_t>(queue)];
      once_outlets_.push_back(std::make_shared<OnceOutlet>(std::move(outlet)));
      outlet = once_outlets_.back();
    }
  }
  outlets_ = std::move(outlets);
  all_outlets_.clear();
  if (plan_.replicas().count == 1) {
    for (const auto& outlet : outlets_) all_outlets_.push_back(outlet.get());
    return;
  }
  shared_outlets_.clear();
  for (const auto& outlet : outlets_) {
    shared_outlets_.push_back(
        std::make_unique<SharedOutlet>(outlet, plan_.replicas().count));
  }
  for (int32_t r = 0; r < plan_.replicas().count; ++r) {
    for (const auto& shared : shared_outlets_) {
      all_outlets_.push_back(&shared->of_replica(r));
    }
  }
}

void Executable::place_inputs(std::vector<std::shared_ptr<Inlet>> inlets,
                              const std::vector<InputPlace>& places) {
  const std::vector<TensorId>& inputs = plan_.inputs();
  check_internal(places.size() == inputs.size(), "connect: got ", places.size(),
                 " places for ", inputs.size(), " inputs");
  const int64_t num_held = plan_.max_held() * plan_.replicas().num_inputs();
  for (const std::shared_ptr<Inlet>& inlet : inlets) {
    check_user(inlet->depth() >= num_held, "connect: the program works on ",
               num_held, " elements at a time, and the queue holds ",
               inlet->depth(), " elements");
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    const InputPlace& place = places[i];
    if (place.feed < 0) continue;
    const graph::Tensor& t = plan_.graph().tensor(inputs[i]);
    check_user(place.feed < std::ssize(inlets), "connect: '", t.name,
               "' comes from queue ", place.feed, " of ", inlets.size());
    const std::vector<int64_t> sizes =
        inlets[static_cast<size_t>(place.feed)]->sizes();
    check_user(place.position >= 0 && place.position < std::ssize(sizes) &&
                   sizes[static_cast<size_t>(place.position)] == t.bytes(),
               "connect: the queue's elements have no '", t.name, "' of ",
               t.bytes(), " bytes at ", place.position);
  }
  feeds_.clear();
  all_feeds_.clear();
  for (std::shared_ptr<Inlet>& inlet : inlets) {
    feeds_.push_back(std::make_unique<Feed>(std::move(inlet),
                                            plan_.replicas().num_inputs()));
    all_feeds_.push_back(feeds_.back().get());
  }
  places_ = places;
  sources_.clear();
  all_sources_.clear();
  slices_.clear();
  for (size_t i = 0; i < inputs.size(); ++i) {
    const InputPlace& place = places[i];
    if (place.feed >= 0) {
      sources_.push_back(std::make_unique<FedTensor>(
          *feeds_.at(static_cast<size_t>(place.feed)),
          static_cast<size_t>(place.position)));
    } else {
      auto slice = std::make_unique<CallSlice>(
          place.shared ? 0 : plan_.graph().tensor(inputs[i]).bytes(),
          plan_.replicas().num_inputs());
      slices_.push_back(slice.get());
      sources_.push_back(std::move(slice));
    }
    all_sources_.push_back(sources_.back().get());
  }
}

std::vector<at::Tensor> Executable::make_results() {
  std::vector<at::Tensor> results;
  for (size_t i = 0; i < returns_.size(); ++i) {
    const ops::Return& made = returns_[i];
    results.push_back(
        made.keep ? at::Tensor()
                  : at::empty(made.shape, ops::to_scalar_type(made.dtype)));
    buffers_[i].point_at(made.keep ? kept_[i] : results.back());
  }
  return results;
}

void Executable::load() {
  const Usage::Run run(usage_);
  stage_.load(listeners(nullptr));
}

std::vector<Listener*> Executable::listeners(Listener* other) {
  std::vector<Listener*> found;
  if (other != nullptr) found.push_back(other);
  if (watch_) found.push_back(&*watch_);
  return found;
}

std::vector<at::Tensor> Executable::run(const std::vector<at::Tensor>& inputs,
                                        const Company& company) {
  const Usage::Run run(usage_);
  return this->run(inputs, company, nullptr);
}

std::vector<at::Tensor> Executable::run(const std::vector<at::Tensor>& inputs,
                                        const Company& company,
                                        Listener* listener,
                                        int64_t unchecked_iteration) {
  check_inputs(inputs);
  ++num_runs_;
  forget_bad_run();
  return fill(make_results(), [&] {
    run_from(0, unchecked_iteration, inputs, company, listener);
  });
}

template <typename Run>
std::vector<at::Tensor> Executable::fill(std::vector<at::Tensor> results,
                                         Run&& run) {
  try {
    std::forward<Run>(run)();
  } catch (const ops::BadNumber&) {
    begun_ = std::move(results);
    throw;
  }
  return results;
}

void Executable::forget_bad_run() {
  begun_.reset();
  for (Feed* feed : all_feeds_) feed->end_run();
  for (const auto& outlet : once_outlets_) {
    outlet->begin_iteration(/*again=*/false);
  }
}

void Executable::let_go() {
  const Usage::Copy copy(usage_, "let_go");
  forget_bad_run();
}

void Executable::check_bad_run(const char* what) const {
  check_user(begun_.has_value(), what,
             ": no run has ended because of a bad number");
}

std::vector<at::Tensor> Executable::resume(
    const std::vector<at::Tensor>& inputs, const Company& company, bool skip) {
  const Usage::Run run(usage_);
  const int64_t bad = stage_.bad_iteration();
  check_bad_run("resume");
  check_inputs(inputs);
  const bool skips = skip && plan_.training();
  return fill(*std::exchange(begun_, std::nullopt), [&] {
    if (skips) leave_out();
    run_from(skips ? bad + 1 : bad, skips ? -1 : bad, inputs, company, nullptr);
  });
}

void Executable::leave_out() {
  const int64_t next = stage_.bad_iteration() + 1;
  for (Feed* feed : all_feeds_) {
    feed->release_before(next * plan_.loop().gradient_accumulation);
  }
  stage_.skip_iteration();
}

std::vector<at::Tensor> Executable::bad_inputs(
    const std::vector<at::Tensor>& inputs) const {
  const Usage::Copy copy(usage_, "bad_inputs");
  check_bad_run("bad_inputs");
  check_inputs(inputs);
  std::vector<at::Tensor> values;
  size_t next = 0;
  for (size_t i = 0; i < places_.size(); ++i) {
    values.push_back(places_[i].feed < 0 ? bad_part(i, inputs[next++])
                                         : bad_elements(i));
  }
  return values;
}

at::Tensor Executable::bad_part(size_t input, const at::Tensor& given) const {
  const at::Tensor flat = given.reshape({-1});
  if (places_[input].shared || !plan_.training()) return flat.clone();
  const int64_t size = flat.numel() / plan_.loop().device_iterations;
  return flat.narrow(0, stage_.bad_iteration() * size, size).clone();
}

at::Tensor Executable::bad_elements(size_t input) const {
  const graph::Tensor& t = plan_.graph().tensor(plan_.inputs()[input]);
  const InputPlace& place = places_[input];
  Feed& feed = *feeds_[static_cast<size_t>(place.feed)];
  const int64_t accumulation = plan_.loop().gradient_accumulation;
  const int64_t first = stage_.bad_iteration() * accumulation;
  const int64_t num_inputs = plan_.replicas().num_inputs();
  at::Tensor values = at::empty({accumulation * num_inputs * t.numel()},
                                ops::to_scalar_type(t.dtype));
  auto* next = static_cast<char*>(values.mutable_data_ptr());
  for (int64_t i = first; i < first + accumulation; ++i) {
    check_internal(feed.holds(i), "bad_inputs: the elements of micro-batch ", i,
                   " are not held");
    for (int64_t which = 0; which < num_inputs; ++which) {
      const auto parts = feed.element(i, which);
      std::memcpy(next, parts[static_cast<size_t>(place.position)],
                  static_cast<size_t>(t.bytes()));
      next += t.bytes();
    }
  }
  return values;
}

int64_t Executable::bad_iteration() const {
  const Usage::Copy copy(usage_, "bad_iteration");
  return stage_.bad_iteration();
}

NumberRecord Executable::log_numbers(const std::vector<at::Tensor>& inputs,
                                     const Company& company, int64_t copied) {
  const Usage::Run run(usage_);
  NumberLog log(plan_.graph(), copied);
  try {
    this->run(inputs, company, &log, 0);
  } catch (const Stopped&) {
    throw;
  } catch (const UserError& error) {
    log.record().error = error.what();
  }
  return std::move(log.record());
}

void Executable::run_from(int64_t first_iteration, int64_t unchecked_iteration,
                          const std::vector<at::Tensor>& inputs,
                          const Company& company, Listener* listener) {
  const auto called = std::chrono::steady_clock::now();
  for (size_t i = 0; i < inputs.size(); ++i) {
    slices_[i]->point_at(inputs[i].data_ptr());
  }
  stop_.begin_run(company.overseer);
  const std::vector<Listener*> listeners = this->listeners(listener);
  const auto began = std::chrono::steady_clock::now();
  if (timeline_) timeline_->begin_run();
  stage_.run({all_sources_, sinks_, all_feeds_, all_outlets_, seed_,
              company.host, company.exchange, listeners, stop_, first_iteration,
              unchecked_iteration, timeline_ ? &*timeline_ : nullptr,
              once_outlets_});
  if (timeline_) timeline_->end_run();
  called_ = called;
  began_ = began;
  ended_ = std::chrono::steady_clock::now();
}

int64_t Executable::num_iterations() const {
  const Usage::Copy copy(usage_, "num_iterations");
  return stage_.num_iterations();
}

std::tuple<double, double, double> Executable::last_run() const {
  const Usage::Copy copy(usage_, "last_run");
  const auto seconds = [](std::chrono::steady_clock::time_point time) {
    return std::chrono::duration<double>(time.time_since_epoch()).count();
  };
  return {seconds(called_), seconds(began_), seconds(ended_)};
}

std::vector<OpTime> Executable::profile(const std::vector<at::Tensor>& inputs,
                                        int64_t repeats,
                                        const Company& company) {
  check_user(repeats > 0, "profile: repeats must be at least 1, got ", repeats);
  const Usage::Run run(usage_);
  Stopwatch stopwatch(plan_.graph());
  for (int64_t i = 0; i < repeats; ++i) {
    this->run(inputs, company, &stopwatch);
    stopwatch.end_run();
  }
  return stopwatch.times();
}

void Executable::record(bool on) {
  const Usage::Copy copy(usage_, "record_timeline");
  timeline_.reset();
  if (on) timeline_.emplace(plan_);
}

std::optional<Timeline> Executable::timeline() const {
  const Usage::Copy copy(usage_, "timeline");
  return timeline_ && timeline_->complete() ? timeline_ : std::nullopt;
}

at::Tensor Executable::memory_of(TensorId id, int32_t replica) const {
  const graph::Tensor& t = plan_.graph().tensor(id);
  void* start = stage_.memory(replica).pointer(id);
  check_internal(start != nullptr || t.numel() == 0, "'", t.name,
                 "' has no memory on the device");
  return at::from_blob(start, t.shape, t.strides, ops::to_scalar_type(t.dtype));
}

Groups Executable::groups_of(TensorId id) const {
  const auto& groups = plan_.replicas().variable_groups;
  const auto found = groups.find(plan_.graph().root(id));
  return found == groups.end() ? Groups() : found->second;
}

void Executable::check_size(const char* what, TensorId id,
                            const at::Tensor& other) const {
  const graph::Tensor& t = plan_.graph().tensor(id);
  const int64_t count = std::ssize(first_users(groups_of(id)));
  check_user(other.numel() == t.numel() * count, what, ": '", t.name,
             "' has shape ", to_string(t.shape),
             count == 1 ? "" : join(" for each of ", count, " groups"),
             ", the other tensor has ", other.numel(), " elements");
}

void Executable::write(const std::map<TensorId, at::Tensor>& values,
                       const std::map<TensorId, double>& factors) {
  const Usage::Copy copy(usage_, "write");
  for (const auto& [id, value] : values) check_size("write", id, value);
  const auto change = [&](TensorId id, const auto& change_memory) {
    const auto root = static_cast<size_t>(plan_.graph().root(id));
    for (const int32_t replica : first_users(plan_.instances()[root])) {
      const OpenTensors open(plan_.graph(), stage_.memory(replica),
                             std::span(&id, 1));
      change_memory(memory_of(id, replica), static_cast<size_t>(replica));
    }
    stage_.note_written(id);
  };
  for (const auto& [id, value] : values) {
    const Groups groups = groups_of(id);
    Shape shape = plan_.graph().tensor(id).shape;
    if (!groups.empty()) {
      shape.insert(shape.begin(), std::ssize(first_users(groups)));
    }
    const at::Tensor shaped = value.reshape(shape);
    change(id, [&](const at::Tensor& memory, size_t replica) {
      memory.copy_(groups.empty() ? shaped : shaped[groups[replica]]);
    });
  }
  for (const auto& [id, factor] : factors) {
    change(id, [&](const at::Tensor& memory, size_t /*replica*/) {
      memory.mul_(factor);
    });
  }
}

at::Tensor Executable::copy_of(TensorId id) const {
  const Groups groups = groups_of(id);
  std::vector<at::Tensor> copies;
  for (const int32_t replica : first_users(groups)) {
    const OpenTensors open(plan_.graph(), stage_.memory(replica),
                           std::span(&id, 1));
    copies.push_back(
        memory_of(id, replica).clone(at::MemoryFormat::Contiguous));
  }
  return groups.empty() ? copies[0] : at::stack(copies);
}

std::vector<at::Tensor> Executable::read(
    const std::vector<TensorId>& ids) const {
  const Usage::Copy copy(usage_, "read");
  std::vector<at::Tensor> values;
  for (const TensorId id : ids) values.push_back(copy_of(id));
  return values;
}

void Executable::read_into(
    const std::map<TensorId, at::Tensor>& targets) const {
  const Usage::Copy copy(usage_, "read");
  for (const auto& [id, target] : targets) check_size("read", id, target);
  for (const auto& [id, target] : targets) {
    if (!groups_of(id).empty()) {
      target.copy_(copy_of(id).reshape(target.sizes()));
      continue;
    }
    const OpenTensors open(plan_.graph(), stage_.memory(0), std::span(&id, 1));
    target.copy_(memory_of(id, 0).reshape(target.sizes()));
  }
}

at::Tensor Executable::read_kept(int64_t index, TensorId id) const {
  const Usage::Copy copy(usage_, "read_kept");
  const at::Tensor& buffer = kept_.at(static_cast<size_t>(index));
  check_internal(buffer.defined(), "read_kept: return ", index,
                 " is not kept on the device");
  const ops::Return& filled = returns_[static_cast<size_t>(index)];
  if (id == filled.source) return buffer.clone();
  const graph::Graph& graph = plan_.graph();
  const graph::Tensor& view = graph.tensor(id);
  check_internal(graph.root(id) == filled.source &&
                     view.numel() == graph.tensor(filled.source).numel(),
                 "read_kept: '", view.name, "' is not in return ", index);
  Shape sizes{filled.num_entries};
  Shape strides{view.numel()};
  sizes.insert(sizes.end(), view.shape.begin(), view.shape.end());
  strides.insert(strides.end(), view.strides.begin(), view.strides.end());
  return buffer.as_strided(sizes, strides)
      .clone(at::MemoryFormat::Contiguous)
      .view(ops::shape_of_entries(view.shape, filled.num_entries));
}

void Executable::write_observed(TensorId id, const at::Tensor& value) {
  const Usage::Copy copy(usage_, "write_observed");
  const graph::Graph& graph = observed_->graph();
  const graph::Tensor& t = graph.tensor(id);
  const DeviceMemory& memory = stage_.observed_memory();
  const OpenTensors open(graph, memory, std::span(&id, 1));
  at::from_blob(memory.pointer(id), t.shape, t.strides,
                ops::to_scalar_type(t.dtype))
      .copy_(value.reshape(t.shape));
}

void Executable::set_pace(const Pace& pace) {
  const Usage::Copy copy(usage_, "set_pace");
  stage_.set_pace(pace);
}

int64_t Executable::observed_every() const {
  const Usage::Copy copy(usage_, "observed_every");
  return stage_.pace().every();
}

void Executable::set_seed(uint64_t seed) {
  const Usage::Copy copy(usage_, "seed");
  seed_ = seed;
}

uint64_t Executable::seed() const {
  const Usage::Copy copy(usage_, "seed");
  return seed_;
}

void Executable::set_step(int64_t step) {
  const Usage::Copy copy(usage_, "step");
  stage_.set_step(step);
}

int64_t Executable::step() const {
  const Usage::Copy copy(usage_, "step");
  return stage_.step();
}

}  // namespace popsim::runtime
