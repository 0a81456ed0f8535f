#include "bindings/machine_plans.h"

#include <pybind11/stl.h>

#include "machine/plans/matmul.h"

namespace py = pybind11;

namespace popsim::bindings {
namespace {

using machine::MatmulPlan;

MatmulPlan plan_matmul(const machine::Device& device, int64_t m, int64_t k,
                       int64_t n, int64_t groups, bool half, bool half_partials,
                       bool float_result, double proportion) {
  return machine::plan_matmul(
      device, device.tiles, proportion,
      {m, k, n, groups, {half, half_partials}, float_result});
}

}  // namespace

void bind_machine_plans(py::module_& m) {
  py::class_<MatmulPlan>(m, "MatmulPlan")
      .def_readonly("field", &MatmulPlan::field)
      .def_readonly("in_channels", &MatmulPlan::in)
      .def_readonly("out_channels", &MatmulPlan::out)
      .def_readonly("groups", &MatmulPlan::groups)
      .def_readonly("out_turns", &MatmulPlan::out_turns)
      .def_readonly("in_turns", &MatmulPlan::in_turns)
      .def_readonly("swapped", &MatmulPlan::swapped)
      .def_readonly("exchange_in", &MatmulPlan::exchange_in)
      .def_readonly("exchange_weights", &MatmulPlan::exchange_weights)
      .def_readonly("compute", &MatmulPlan::compute)
      .def_readonly("exchange_partials", &MatmulPlan::exchange_partials)
      .def_readonly("reduce", &MatmulPlan::reduce)
      .def_readonly("slice", &MatmulPlan::slice)
      .def_readonly("cycles", &MatmulPlan::cycles)
      .def_readonly("temporary_bytes", &MatmulPlan::temporary_bytes)
      .def("__str__",
           [](const MatmulPlan& self) { return machine::to_string(self); });
  m.def("plan_matmul", &plan_matmul, py::arg("device"), py::arg("m"),
        py::arg("k"), py::arg("n"), py::arg("groups") = 1,
        py::arg("half") = true, py::arg("half_partials") = true,
        py::arg("float_result") = false, py::arg("proportion") = 0.6);
}

}  // namespace popsim::bindings
