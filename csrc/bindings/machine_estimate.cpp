#include "bindings/machine_estimate.h"

#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "bindings/interpreter_lock.h"
#include "machine/estimate/estimate.h"
#include "ops/work.h"

namespace py = pybind11;

namespace popsim::bindings {
namespace {

using machine::Allocation;
using machine::Estimate;
using machine::HostFeed;
using machine::IpuMemory;
using machine::MemoryClass;
using machine::Parts;
using machine::Placing;
using machine::ProgramTime;
using machine::Settings;
using machine::Slot;
using py::literals::operator""_a;

constexpr const char* kClassNames[machine::kNumMemoryClasses] = {
    "parameters",  "state",       "accumulators", "stash",
    "activations", "temporaries", "code",         "streams"};

const char* name_of(MemoryClass purpose) {
  return kClassNames[static_cast<size_t>(purpose)];
}

MemoryClass class_called(const std::string& name) {
  for (size_t i = 0; i < machine::kNumMemoryClasses; ++i) {
    if (name == kClassNames[i]) return static_cast<MemoryClass>(i);
  }
  throw InternalError("there is no class of memory '" + name + "'");
}

HostFeed feed_called(const std::string& name) {
  if (name == "none") return HostFeed::kNone;
  if (name == "staged") return HostFeed::kStaged;
  check_internal(name == "waiting", "there is no host feed '", name, "'");
  return HostFeed::kWaiting;
}

py::dict dict_of(const Parts& parts) {
  return py::dict("compute"_a = parts.compute, "exchange"_a = parts.exchange,
                  "sync"_a = parts.sync, "glue"_a = parts.glue,
                  "links"_a = parts.links, "host"_a = parts.host,
                  "update"_a = parts.update, "all_reduce"_a = parts.all_reduce,
                  "waiting"_a = parts.waiting);
}

py::dict dict_of(const Allocation& one) {
  return py::dict(
      "tensor"_a = one.tensor, "purpose"_a = name_of(one.purpose),
      "ipu"_a = one.ipu, "bytes"_a = one.bytes, "tiles"_a = one.layout.tiles,
      "bytes_per_tile"_a = one.layout.bytes_per_tile, "copies"_a = one.copies,
      "first_op"_a = one.first_op, "last_op"_a = one.last_op);
}

py::dict dict_of(const IpuMemory& memory) {
  py::dict classes;
  for (size_t i = 0; i < machine::kNumMemoryClasses; ++i) {
    classes[kClassNames[i]] =
        std::pair(memory.classes[i].worst, memory.classes[i].total);
  }
  py::list liveness;
  for (const machine::LivePoint& point : memory.liveness) {
    liveness.append(py::make_tuple(point.op, point.worst, point.mean));
  }
  return py::dict("ipu"_a = memory.ipu, "peak"_a = memory.peak,
                  "mean"_a = memory.mean, "worst_tile"_a = memory.worst_tile,
                  "peak_op"_a = memory.peak_op, "always"_a = memory.always,
                  "classes"_a = std::move(classes), "tiles"_a = memory.tiles,
                  "always_tiles"_a = memory.always_tiles,
                  "liveness"_a = std::move(liveness));
}

py::dict dict_of(const Slot& slot) {
  py::list actions;
  for (const machine::SlotAction& one : slot.actions) {
    actions.append(py::make_tuple(schedule::kind_letter(one.kind), one.stage,
                                  one.ipu, one.micro_batch, one.cycles));
  }
  return py::dict("cycles"_a = slot.cycles, "link_cycles"_a = slot.link_cycles,
                  "actions"_a = std::move(actions));
}

py::list stretches_of(const ProgramTime& time) {
  py::list stretches;
  for (const machine::SlotStretch& stretch : time.stretches) {
    py::list slots;
    for (const Slot& slot : stretch.slots) slots.append(dict_of(slot));
    stretches.append(py::make_tuple(stretch.times, std::move(slots)));
  }
  return stretches;
}

py::dict dict_of(const ProgramTime& time) {
  py::list ipus;
  for (const machine::IpuTime& one : time.ipus) {
    ipus.append(py::dict("busy"_a = one.busy, "use"_a = one.use,
                         "call"_a = dict_of(one.call)));
  }
  py::list links;
  for (const machine::Link& one : time.links) {
    links.append(
        py::make_tuple(one.from, one.to, one.backward, one.bytes, one.cycles));
  }
  const machine::Traffic& traffic = time.traffic;
  const machine::Latency& latency = time.latency;
  return py::dict(
      "stretches"_a = stretches_of(time), "run_cycles"_a = time.run_cycles,
      "update_cycles"_a = time.update_cycles,
      "all_reduce_cycles"_a = time.all_reduce_cycles,
      "call_cycles"_a = time.call_cycles, "ipus"_a = std::move(ipus),
      "links"_a = std::move(links),
      "traffic"_a = py::dict("all_reduce_bytes"_a = traffic.all_reduce_bytes,
                             "all_reduces"_a = traffic.all_reduces,
                             "host_in_bytes"_a = traffic.host_in_bytes,
                             "host_out_bytes"_a = traffic.host_out_bytes,
                             "off_chip_bytes"_a = traffic.off_chip_bytes),
      "latency"_a = py::dict("host_to_ipu"_a = latency.host_to_ipu,
                             "compute"_a = latency.compute,
                             "ipu_to_host"_a = latency.ipu_to_host));
}

double flops_of(const ops::OpView& op) {
  double sum = 0;
  for (const graph::Work& part : ops::work_of(op)) sum += graph::flops(part);
  return sum;
}

py::dict dict_of(const graph::Graph& graph, const Estimate& estimate) {
  py::list ops;
  std::vector<double> flops;
  for (size_t i = 0; i < graph.ops().size(); ++i) {
    ops.append(py::cast(estimate.ops[i]));
    flops.push_back(flops_of(ops::OpView(graph, graph.ops()[i])));
  }
  py::list allocations;
  for (const Allocation& one : estimate.memory.allocations) {
    allocations.append(dict_of(one));
  }
  py::list ipus;
  for (const IpuMemory& one : estimate.memory.ipus) ipus.append(dict_of(one));
  return py::dict("ops"_a = std::move(ops), "flops"_a = flops,
                  "ipu_of_op"_a = estimate.ipu_of_op,
                  "allocations"_a = std::move(allocations),
                  "memory"_a = std::move(ipus),
                  "time"_a = dict_of(estimate.time));
}

py::dict estimate_program(const graph::Graph& graph, const Settings& settings) {
  const Estimate found = [&] {
    const Unlocked unlocked;
    return machine::estimate(graph, settings);
  }();
  return dict_of(graph, found);
}

void set_placings(
    Settings& settings,
    const std::map<graph::TensorId, std::pair<int64_t, bool>>& given) {
  settings.placings.clear();
  for (const auto& [tensor, placing] : given) {
    settings.placings[tensor] = {placing.first, placing.second};
  }
}

void set_classes(Settings& settings,
                 const std::map<graph::TensorId, std::string>& given) {
  settings.classes.clear();
  for (const auto& [tensor, name] : given) {
    settings.classes[tensor] = class_called(name);
  }
}

}  // namespace

void bind_machine_estimate(py::module_& m) {
  py::class_<Settings>(m, "MachineSettings")
      .def(py::init([](const machine::Device& device) {
             return Settings{.device = device};
           }),
           py::arg("device"))
      .def_readwrite("io_tiles", &Settings::io_tiles)
      .def_readwrite("proportions", &Settings::proportions)
      .def_readwrite("training", &Settings::training)
      .def_readwrite("positions", &Settings::positions)
      .def_readwrite("ipu_of_stage", &Settings::ipu_of_stage)
      .def_readwrite("device_iterations", &Settings::device_iterations)
      .def_readwrite("gradient_accumulation", &Settings::gradient_accumulation)
      .def_readwrite("replicas", &Settings::replicas)
      .def_readwrite("overlaps_io", &Settings::overlaps_io)
      .def(
          "set_schedule",
          [](Settings& self, const std::string& name) {
            self.schedule = schedule::kind_called(name);
          },
          py::arg("name"))
      .def(
          "set_feed",
          [](Settings& self, const std::string& name) {
            self.feed = feed_called(name);
          },
          py::arg("name"))
      .def("set_classes", &set_classes, py::arg("classes"))
      .def("set_placings", &set_placings, py::arg("placings"));
  m.def("estimate", &estimate_program, py::arg("graph"), py::arg("settings"));
}

}  // namespace popsim::bindings
