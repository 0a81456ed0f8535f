#include "bindings/runtime.h"

#include <optional>
#include <tuple>
#include <utility>

#include "bindings/interpreter_lock.h"
#include "bindings/python_code.h"
#include "bindings/python_exchange.h"
#include "bindings/signals.h"
#include "runtime/executable.h"

namespace py = pybind11;

namespace popsim::bindings {
namespace {

using graph::Graph;
using graph::TensorId;
using runtime::ActionTime;
using runtime::BadExecution;
using runtime::BadTensor;
using runtime::Company;
using runtime::Executable;
using runtime::NumberRecord;
using runtime::Plan;
using runtime::RunConfig;
using runtime::Timeline;

// The numbers of an exchange, and the function that adds them up.
using GivenExchange = std::optional<std::tuple<at::Tensor, py::object>>;

// The place of a tensor in the arena, and the steps of the program that use it.
struct ArenaRange {
  TensorId tensor;
  int64_t first_step;
  int64_t last_step;
  int64_t offset;
  int64_t slot_bytes;
  int64_t num_slots;
};

std::vector<ArenaRange> arena_ranges(const Plan& plan) {
  std::vector<ArenaRange> ranges;
  for (const memory::LiveRange& range : plan.live_ranges()) {
    const memory::Placement& place =
        plan.arena().placements[static_cast<size_t>(range.tensor)];
    ranges.push_back({range.tensor, range.first, range.last, place.offset,
                      place.slot_bytes, place.num_slots});
  }
  return ranges;
}

// Runs a call that may take long, without the interpreter's lock. The program
// may call the function, which may be None, and exchange gradients.
template <typename Call>
auto supervised(const py::object& function, const GivenExchange& exchange,
                Call&& call) {
  SignalOverseer overseer;
  PythonCode code(function);
  std::optional<PythonExchange> peers;
  if (exchange)
    std::apply([&](auto&... parts) { peers.emplace(parts...); }, *exchange);
  try {
    auto result = [&] {
      const Unlocked unlocked;
      return call(Company{&overseer, function.is_none() ? nullptr : &code,
                          peers ? &*peers : nullptr});
    }();
    overseer.rethrow();
    return result;
  } catch (const ops::HostFailure&) {
    code.rethrow();
    if (peers) peers->rethrow();
    throw;
  } catch (const runtime::Stopped&) {
    overseer.rethrow();
    throw;
  }
}

void bind_plan(py::module_& m) {
  py::class_<RunConfig>(m, "RunConfig")
      .def(py::init([](int64_t device_iterations, int64_t gradient_accumulation,
                       bool training, const std::string& schedule,
                       bool floating_point_checks, bool fed,
                       int32_t stage_threads, std::vector<int32_t> positions,
                       int64_t num_processes, int64_t process, int32_t replicas,
                       runtime::Groups input_groups,
                       std::map<TensorId, runtime::Groups> variable_groups) {
             return RunConfig{device_iterations,
                              gradient_accumulation,
                              training,
                              schedule::kind_called(schedule),
                              floating_point_checks,
                              fed,
                              stage_threads,
                              std::move(positions),
                              num_processes,
                              process,
                              {replicas, std::move(input_groups),
                               std::move(variable_groups)}};
           }),
           py::arg("device_iterations"), py::arg("gradient_accumulation"),
           py::arg("training"), py::arg("schedule"),
           py::arg("floating_point_checks") = false, py::arg("fed") = false,
           py::arg("stage_threads") = 0,
           py::arg("positions") = std::vector<int32_t>(),
           py::arg("num_processes") = 1, py::arg("process") = 0,
           py::arg("replicas") = 1, py::arg("input_groups") = runtime::Groups(),
           py::arg("variable_groups") = std::map<TensorId, runtime::Groups>());
  py::class_<ArenaRange>(m, "ArenaRange")
      .def_readonly("tensor", &ArenaRange::tensor)
      .def_readonly("first_step", &ArenaRange::first_step)
      .def_readonly("last_step", &ArenaRange::last_step)
      .def_readonly("offset", &ArenaRange::offset)
      .def_readonly("slot_bytes", &ArenaRange::slot_bytes)
      .def_readonly("num_slots", &ArenaRange::num_slots);
  py::class_<Plan>(m, "Plan")
      .def(py::init<Graph, RunConfig>(), py::arg("graph"), py::arg("config"),
           py::call_guard<Unlocked>())
      .def_property_readonly(
          "arena_bytes",
          [](const Plan& self) { return self.arena().arena_bytes; })
      .def_property_readonly(
          "peak_live_bytes",
          [](const Plan& self) { return self.arena().peak_live_bytes; })
      .def_property_readonly(
          "persistent_bytes",
          [](const Plan& self) { return self.persistent().bytes; })
      .def_property_readonly("max_in_flight",
                             [](const Plan& self) {
                               return schedule::max_in_flight(self.schedule());
                             })
      .def_property_readonly("max_held", &Plan::max_held)
      .def_property_readonly("keeps_elements", &Plan::keeps_elements)
      .def_property_readonly("lane_of_stage", &Plan::lane_of_stage)
      .def_property_readonly("num_teams", &Plan::num_teams)
      .def("schedule_times",
           [](const Plan& self) {
             return schedule::time_table(self.schedule());
           })
      .def("arena_ranges", &arena_ranges);
}

void bind_numbers(py::module_& m) {
  py::class_<BadTensor>(m, "BadTensor")
      .def_readonly("tensor", &BadTensor::tensor)
      .def_readonly("nan", &BadTensor::nan)
      .def_readonly("infinity", &BadTensor::infinity);
  py::class_<BadExecution>(m, "BadExecution")
      .def_readonly("path", &BadExecution::path)
      .def_readonly("number", &BadExecution::number)
      .def_readonly("micro_batch", &BadExecution::micro_batch)
      .def_readonly("iteration", &BadExecution::iteration)
      .def_readonly("replica", &BadExecution::replica)
      .def_readonly("operands", &BadExecution::operands)
      .def_readonly("results", &BadExecution::results);
  py::class_<NumberRecord>(m, "NumberRecord")
      .def_readonly("executions", &NumberRecord::executions)
      .def_readonly("operands", &NumberRecord::operands)
      .def_readonly("results", &NumberRecord::results)
      .def_readonly("error", &NumberRecord::error);
}

}  // namespace

void bind_runtime(py::module_& m) {
  bind_plan(m);
  bind_numbers(m);
  py::class_<runtime::OpTime>(m, "OpTime")
      .def_readonly("op", &runtime::OpTime::op)
      .def_readonly("executions", &runtime::OpTime::executions)
      .def_readonly("seconds", &runtime::OpTime::seconds);
  py::class_<ActionTime>(m, "ActionTime")
      .def_property_readonly("kind",
                             [](const ActionTime& self) {
                               return schedule::kind_letter(self.kind);
                             })
      .def_readonly("replica", &ActionTime::replica)
      .def_readonly("stage", &ActionTime::stage)
      .def_readonly("index", &ActionTime::index)
      .def_readonly("begin", &ActionTime::begin)
      .def_readonly("end", &ActionTime::end)
      .def_readonly("thread", &ActionTime::thread);
  py::class_<Timeline>(m, "Timeline")
      .def_property_readonly("seconds", &Timeline::seconds)
      .def("actions", &Timeline::actions);
  py::class_<runtime::InputPlace>(m, "InputPlace")
      .def(py::init<int64_t, int64_t, bool>(), py::arg("feed") = -1,
           py::arg("position") = 0, py::arg("shared") = false)
      .def_readonly("shared", &runtime::InputPlace::shared);
  py::class_<ops::Outlet, std::shared_ptr<ops::Outlet>>(m, "Outlet");
  py::class_<runtime::Inlet, std::shared_ptr<runtime::Inlet>>(m, "Inlet");
  py::class_<Executable>(m, "Executable")
      .def(py::init([](Graph graph, const RunConfig& config,
                       std::optional<Graph> observed, int64_t num_shared) {
             auto plan = std::make_unique<const Plan>(std::move(graph), config);
             auto beside =
                 observed ? std::make_unique<const Plan>(
                                *std::move(observed), config,
                                memory::Beside{&plan->persistent(), num_shared})
                          : nullptr;
             return std::make_unique<Executable>(std::move(plan),
                                                 std::move(beside));
           }),
           py::arg("graph"), py::arg("config"),
           py::arg("observed") = std::nullopt, py::arg("num_shared") = 0,
           py::call_guard<Unlocked>())
      .def_property_readonly("plan", &Executable::plan,
                             py::return_value_policy::reference_internal)
      .def_property_readonly("observed_plan", &Executable::observed_plan,
                             py::return_value_policy::reference_internal)
      .def("write_observed", &Executable::write_observed, py::arg("tensor"),
           py::arg("value"))
      .def(
          "set_pace",
          [](Executable& self, int64_t every, double budget) {
            self.set_pace(runtime::Pace(every, budget));
          },
          py::arg("every"), py::arg("budget"))
      .def_property_readonly("observed_every", &Executable::observed_every)
      .def("connect", &Executable::connect, py::arg("outlets"),
           py::arg("inlets"), py::arg("places"))
      .def("load", &Executable::load, py::call_guard<Unlocked>())
      .def(
          "run",
          [](Executable& self, const std::vector<at::Tensor>& inputs,
             const py::object& host, const GivenExchange& exchange) {
            return supervised(host, exchange, [&](const Company& company) {
              return self.run(inputs, company);
            });
          },
          py::arg("inputs"), py::arg("host") = py::none(),
          py::arg("exchange") = py::none())
      .def(
          "resume",
          [](Executable& self, const std::vector<at::Tensor>& inputs, bool skip,
             const py::object& host, const GivenExchange& exchange) {
            return supervised(host, exchange, [&](const Company& company) {
              return self.resume(inputs, company, skip);
            });
          },
          py::arg("inputs"), py::arg("skip"), py::arg("host") = py::none(),
          py::arg("exchange") = py::none())
      .def_property_readonly("bad_iteration", &Executable::bad_iteration)
      .def("bad_inputs", &Executable::bad_inputs, py::arg("inputs"))
      .def("let_go", &Executable::let_go)
      .def(
          "log_numbers",
          [](Executable& self, const std::vector<at::Tensor>& inputs,
             int64_t copied, const py::object& host) {
            return supervised(host, std::nullopt, [&](const Company& company) {
              return self.log_numbers(inputs, company, copied);
            });
          },
          py::arg("inputs"), py::arg("copied") = -1,
          py::arg("host") = py::none())
      .def(
          "profile",
          [](Executable& self, const std::vector<at::Tensor>& inputs,
             int64_t repeats, const py::object& host,
             const GivenExchange& exchange) {
            return supervised(host, exchange, [&](const Company& company) {
              return self.profile(inputs, repeats, company);
            });
          },
          py::arg("inputs"), py::arg("repeats"), py::arg("host") = py::none(),
          py::arg("exchange") = py::none())
      .def("record", &Executable::record, py::arg("on"))
      .def("timeline", &Executable::timeline)
      .def("stop", &Executable::stop)
      .def_property_readonly("num_micro_batches",
                             &Executable::num_micro_batches)
      .def_property_readonly("last_micro_batch", &Executable::last_micro_batch)
      .def_property_readonly("num_iterations", &Executable::num_iterations)
      .def_property_readonly("num_runs", &Executable::num_runs)
      .def_property_readonly("running", &Executable::running)
      .def_property_readonly("last_run", &Executable::last_run)
      .def(
          "write",
          [](Executable& self, TensorId id, const at::Tensor& value) {
            self.write({{id, value}}, {});
          },
          py::arg("tensor"), py::arg("value"))
      .def("write_all", &Executable::write, py::arg("values"),
           py::arg("factors") = std::map<TensorId, double>())
      .def(
          "read",
          [](const Executable& self, TensorId id) {
            return self.read({id}).front();
          },
          py::arg("tensor"))
      .def("read_all", &Executable::read, py::arg("tensors"))
      .def("read_into", &Executable::read_into, py::arg("targets"))
      .def("read_kept", &Executable::read_kept, py::arg("index"),
           py::arg("tensor"))
      .def_property("seed", &Executable::seed, &Executable::set_seed)
      .def_property("step", &Executable::step, &Executable::set_step)
      .def("actions",
           [](const Executable& self) {
             return to_string(self.plan().schedule());
           })
      .def("program", [](const Executable& self) {
        return to_string(self.plan().graph());
      });
}

}  // namespace popsim::bindings
