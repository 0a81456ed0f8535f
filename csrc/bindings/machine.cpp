#include "bindings/machine.h"

#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "bindings/machine_estimate.h"
#include "bindings/machine_plans.h"
#include "machine/cost/cost.h"
#include "machine/device.h"

namespace py = pybind11;

namespace popsim::bindings {
namespace {

using machine::Constant;
using machine::Device;
using machine::Grade;
using machine::OpCost;

std::string name_of(Grade grade) {
  switch (grade) {
    case Grade::kPublished:
      return "A";
    case Grade::kFitted:
      return "B";
    case Grade::kAssumed:
      return "C";
    case Grade::kNone:
      break;
  }
  return "";
}

// The cost of one op of a graph, with linear layouts of its inputs.
OpCost op_cost(const graph::Graph& graph, int64_t index, const Device& device,
               double proportion) {
  machine::Layouts layouts(graph, device.tiles);
  machine::CostContext context{device, device.tiles, proportion, layouts};
  const ops::OpView op(graph, graph.ops().at(static_cast<size_t>(index)));
  return machine::cost_of(op, context);
}

void bind_device(py::module_& m) {
  py::class_<Device>(m, "MachineDevice")
      .def(py::init(&machine::device_of), py::arg("version"))
      .def_readwrite("name", &Device::name)
      .def_readonly("version", &Device::version)
      .def_readwrite("tiles", &Device::tiles)
      .def_readwrite("tile_bytes", &Device::tile_bytes)
      .def_readwrite("clock", &Device::clock)
      .def_readwrite("links", &Device::links)
      .def_readwrite("shares_bus", &Device::shares_bus);
}

void bind_constants(py::module_& m) {
  py::class_<Constant>(m, "MachineConstant")
      .def_property_readonly(
          "name", [](const Constant& self) { return std::string(self.name); })
      .def_readonly("value", &Constant::value)
      .def_property_readonly(
          "unit", [](const Constant& self) { return std::string(self.unit); })
      .def_property_readonly(
          "grade", [](const Constant& self) { return name_of(self.grade); })
      .def_property_readonly(
          "source",
          [](const Constant& self) { return std::string(self.source); })
      .def_readonly("least", &Constant::least)
      .def_readonly("most", &Constant::most);
  m.def("machine_constants", [] {
    return std::vector<Constant>(machine::constants::kAll.begin(),
                                 machine::constants::kAll.end());
  });
}

void bind_costs(py::module_& m) {
  py::class_<OpCost>(m, "OpCost")
      .def_readonly("compute", &OpCost::compute)
      .def_readonly("exchange", &OpCost::exchange)
      .def_readonly("sync", &OpCost::sync)
      .def_readonly("glue", &OpCost::glue)
      .def_property_readonly("cycles", &OpCost::cycles)
      .def_readonly("temporary_bytes", &OpCost::temporary_bytes)
      .def_readonly("exchanges", &OpCost::exchanges)
      .def_property_readonly(
          "grade", [](const OpCost& self) { return name_of(self.grade); })
      .def_readonly("formula", &OpCost::formula)
      .def_readonly("plan", &OpCost::plan);
  m.def("op_cost", &op_cost, py::arg("graph"), py::arg("op"), py::arg("device"),
        py::arg("proportion") = 0.6);
  m.def(
      "has_cost_rule",
      [](const std::string& kind) {
        return machine::find_cost_rule(kind) != nullptr;
      },
      py::arg("kind"));
}

}  // namespace

void bind_machine(py::module_& m) {
  bind_device(m);
  bind_constants(m);
  bind_costs(m);
  bind_machine_estimate(m);
  bind_machine_plans(m);
}

}  // namespace popsim::bindings
