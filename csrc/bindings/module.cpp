// The Python bindings of the C++ library: converters and one-line calls.
#include <pybind11/complex.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "bindings/feeds.h"
#include "bindings/host_watch.h"
#include "bindings/machine.h"
#include "bindings/ops.h"
#include "bindings/plain_arguments.h"
#include "bindings/runtime.h"
#include "graph/graph.h"
#include "ops/check.h"
#include "ops/number_checks.h"
#include "schedule/action.h"

namespace py = pybind11;

namespace popsim::bindings {
namespace {

using graph::Graph;
using graph::Op;
using graph::Tensor;
using graph::TensorId;

void bind_errors(py::module_& m) {
  const auto& user_error =
      py::register_exception<UserError>(m, "UserError", PyExc_RuntimeError);
  // Of the classes that fit, the one that is registered last is raised.
  py::register_exception<ops::BadNumber>(m, "BadNumber", user_error);
  py::register_exception<InternalError>(m, "InternalError", PyExc_RuntimeError);
}

void bind_graph(py::module_& m) {
  py::enum_<graph::TensorKind>(m, "TensorKind")
      .value("INPUT", graph::TensorKind::kInput)
      .value("CONSTANT", graph::TensorKind::kConstant)
      .value("VARIABLE", graph::TensorKind::kVariable)
      .value("VALUE", graph::TensorKind::kValue)
      .value("VIEW", graph::TensorKind::kView);
  py::enum_<graph::Phase>(m, "Phase")
      .value("SETUP", graph::Phase::kSetup)
      .value("FORWARD", graph::Phase::kForward)
      .value("BACKWARD", graph::Phase::kBackward)
      .value("UPDATE", graph::Phase::kUpdate);
  py::class_<graph::TensorArgument>(m, "TensorArgument")
      .def(py::init<int64_t>(), py::arg("input"));
  py::class_<graph::TensorListArgument>(m, "TensorListArgument")
      .def(py::init<std::vector<int64_t>>(), py::arg("inputs"));
  py::class_<graph::Arguments>(m, "Arguments")
      .def(py::init<std::vector<graph::Argument>>(), py::arg("values"));
  py::class_<Graph, std::shared_ptr<Graph>>(m, "Graph")
      .def(py::init<>())
      .def(
          "add_tensor",
          [](Graph& self, std::string name, graph::TensorKind kind,
             const std::string& dtype, Shape shape, Strides strides,
             TensorId base, int64_t offset) {
            return self.add(Tensor{std::move(name), kind,
                                   dtype_from_name(dtype), std::move(shape),
                                   std::move(strides), base, offset});
          },
          py::arg("name"), py::arg("kind"), py::arg("dtype"), py::arg("shape"),
          py::arg("strides"), py::arg("base") = graph::kNoTensor,
          py::arg("offset") = 0)
      .def(
          "add_op",
          [](Graph& self, std::string kind, std::string name,
             std::vector<TensorId> inputs, std::vector<TensorId> outputs,
             std::map<std::string, graph::Attribute, std::less<>> attributes,
             graph::Phase phase, int32_t stage, std::string source,
             const std::vector<std::shared_ptr<Graph>>& bodies) {
            Op op{std::move(kind),
                  std::move(name),
                  std::move(inputs),
                  std::move(outputs),
                  std::move(attributes),
                  phase,
                  stage,
                  std::move(source),
                  {}};
            // Bodies are shared, not copied: an op's body never changes.
            for (const std::shared_ptr<Graph>& body : bodies) {
              check_internal(body != nullptr, "add_op: a body is missing");
              op.bodies.push_back(body);
            }
            self.add(std::move(op));
          },
          py::arg("kind"), py::arg("name"), py::arg("inputs"),
          py::arg("outputs"), py::arg("attributes"), py::arg("phase"),
          py::arg("stage"), py::arg("source") = "",
          py::arg("bodies") = std::vector<std::shared_ptr<Graph>>())
      .def(
          "verify",
          [](const Graph& self, bool in_flight, bool types) {
            ops::verify(self, in_flight, types);
          },
          py::arg("in_flight") = false, py::arg("types") = true)
      .def(
          "verify_order",
          [](const Graph& self, bool in_flight) {
            graph::verify(self);
            ops::check_order(self, in_flight);
          },
          py::arg("in_flight") = false)
      .def("__str__", [](const Graph& self) { return to_string(self); });
}

schedule::Schedule generate(const std::string& name, int32_t num_stages,
                            int64_t num_micro_batches, bool training,
                            const std::vector<int32_t>& positions) {
  return schedule::generate(
      schedule::kind_called(name),
      {num_stages, num_micro_batches, training, positions});
}

void bind_schedule(py::module_& m) {
  m.def(
      "schedule_actions",
      [](const std::string& name, int32_t num_stages, int64_t num_micro_batches,
         bool training, const std::vector<int32_t>& positions) {
        return to_string(
            generate(name, num_stages, num_micro_batches, training, positions));
      },
      py::arg("name"), py::arg("num_stages"), py::arg("num_micro_batches"),
      py::arg("training"), py::arg("positions") = std::vector<int32_t>());
  m.def(
      "schedule_times",
      [](const std::string& name, int32_t num_stages, int64_t num_micro_batches,
         bool training, const std::vector<int32_t>& positions) {
        return schedule::time_table(
            generate(name, num_stages, num_micro_batches, training, positions));
      },
      py::arg("name"), py::arg("num_stages"), py::arg("num_micro_batches"),
      py::arg("training"), py::arg("positions") = std::vector<int32_t>());
  m.def(
      "max_in_flight",
      [](const std::string& name, int32_t num_stages, int64_t num_micro_batches,
         bool training, const std::vector<int32_t>& positions) {
        return schedule::max_in_flight(
            generate(name, num_stages, num_micro_batches, training, positions));
      },
      py::arg("name"), py::arg("num_stages"), py::arg("num_micro_batches"),
      py::arg("training"), py::arg("positions") = std::vector<int32_t>());
  m.def(
      "validate_schedule",
      [](const std::string& actions, int32_t num_stages,
         int64_t num_micro_batches, bool training) {
        schedule::validate(schedule::parse(actions),
                           {num_stages, num_micro_batches, training});
      },
      py::arg("actions"), py::arg("num_stages"), py::arg("num_micro_batches"),
      py::arg("training"));
}

}  // namespace
}  // namespace popsim::bindings

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "The simulated IPU of popsim_torch.";
  popsim::bindings::bind_errors(m);
  popsim::bindings::bind_graph(m);
  popsim::bindings::bind_runtime(m);
  popsim::bindings::bind_plain_arguments(m);
  popsim::bindings::bind_feeds(m);
  popsim::bindings::bind_host_watch(m);
  popsim::bindings::bind_schedule(m);
  popsim::bindings::bind_ops(m);
  popsim::bindings::bind_machine(m);
}
