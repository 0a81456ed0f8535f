#include "bindings/machine_plans.h"

#include <pybind11/stl.h>

#include <array>

#include "machine/plans/convolution.h"
#include "machine/plans/matmul.h"

namespace py = pybind11;

namespace popsim::bindings {
namespace {

using machine::ConvolutionPlan;
using machine::MatmulPlan;

MatmulPlan plan_matmul(const machine::Device& device, int64_t m, int64_t k,
                       int64_t n, int64_t groups, bool half, bool half_partials,
                       bool float_result, double proportion, double sync) {
  return machine::plan_matmul(
      device, device.tiles, proportion,
      {m, k, n, groups, {half, half_partials}, float_result}, sync);
}

using Pair = std::array<int64_t, 2>;  // of rows and columns

ConvolutionPlan plan_convolution(const machine::Device& device, int64_t batch,
                                 const Pair& size, int64_t in, int64_t out,
                                 const Pair& kernel, const Pair& stride,
                                 int64_t groups, bool half, bool half_partials,
                                 bool float_result, double proportion) {
  return machine::plan_convolution(device, device.tiles, proportion,
                                   {.batch = batch,
                                    .rows = size[0],
                                    .columns = size[1],
                                    .in = in,
                                    .out = out,
                                    .groups = groups,
                                    .kernel_rows = kernel[0],
                                    .kernel_columns = kernel[1],
                                    .stride_rows = stride[0],
                                    .stride_columns = stride[1],
                                    .types = {half, half_partials},
                                    .float_result = float_result});
}

void bind_convolution_plans(py::module_& m) {
  py::class_<ConvolutionPlan>(m, "ConvolutionPlan")
      .def_readonly("batch", &ConvolutionPlan::batch)
      .def_readonly("rows", &ConvolutionPlan::rows)
      .def_readonly("columns", &ConvolutionPlan::columns)
      .def_readonly("in_channels", &ConvolutionPlan::in)
      .def_readonly("out_channels", &ConvolutionPlan::out)
      .def_readonly("groups", &ConvolutionPlan::groups)
      .def_readonly("turns", &ConvolutionPlan::turns)
      .def_readonly("exchange", &ConvolutionPlan::exchange)
      .def_readonly("compute", &ConvolutionPlan::compute)
      .def_readonly("sync", &ConvolutionPlan::sync)
      .def_readonly("cycles", &ConvolutionPlan::cycles)
      .def_readonly("temporary_bytes", &ConvolutionPlan::temporary_bytes)
      .def("__str__", [](const ConvolutionPlan& self) {
        return machine::to_string(self);
      });
  m.def("plan_convolution", &plan_convolution, py::arg("device"),
        py::arg("batch"), py::arg("size"), py::arg("in_channels"),
        py::arg("out_channels"), py::arg("kernel"),
        py::arg("stride") = Pair{1, 1}, py::arg("groups") = 1,
        py::arg("half") = true, py::arg("half_partials") = true,
        py::arg("float_result") = false, py::arg("proportion") = 0.6);
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
      .def_readonly("phases", &MatmulPlan::phases)
      .def_readonly("cycles", &MatmulPlan::cycles)
      .def_readonly("temporary_bytes", &MatmulPlan::temporary_bytes)
      .def("__str__",
           [](const MatmulPlan& self) { return machine::to_string(self); });
  m.def("plan_matmul", &plan_matmul, py::arg("device"), py::arg("m"),
        py::arg("k"), py::arg("n"), py::arg("groups") = 1,
        py::arg("half") = true, py::arg("half_partials") = true,
        py::arg("float_result") = false, py::arg("proportion") = 0.6,
        py::arg("sync") = machine::constants::kSync.value);
  bind_convolution_plans(m);
}

}  // namespace popsim::bindings
