#include "bindings/ops.h"

#include <pybind11/stl.h>

#include <optional>
#include <utility>
#include <vector>

#include "dense/available.h"
#include "dense/piece_matmul.h"
#include "dense/problem/matmul.h"
#include "ops/check.h"
#include "ops/custom/call.h"
#include "ops/kernels.h"
#include "ops/schema.h"
#include "ops/work.h"
#include "processor/target.h"

namespace py = pybind11;

namespace popsim::bindings {
namespace {

using ops::AttributeRule;
using ops::OpDef;
using ops::Operand;
using ops::Schema;

using Type = std::pair<std::string, Shape>;

// The amount of one kind of work of an op.
struct WorkView {
  std::string kind;
  double flops;
  int64_t bytes;
};

std::vector<std::string> names_of(const std::vector<DType>& dtypes) {
  std::vector<std::string> names;
  for (const DType dtype : dtypes) names.emplace_back(name_of(dtype));
  return names;
}

ops::OpView view_of(const graph::Graph& graph, int64_t index) {
  return {graph, graph.ops().at(static_cast<size_t>(index))};
}

// An entry is empty if the result is left out, or if only a run determines its
// type.
std::vector<std::optional<Type>> infer_types(const graph::Graph& graph,
                                             int64_t index) {
  std::vector<std::optional<Type>> types;
  for (const ops::TensorType& type : ops::infer_types(view_of(graph, index))) {
    types.emplace_back();
    if (type.state == ops::TensorType::State::kKnown) {
      types.back().emplace(name_of(type.dtype), type.shape);
    }
  }
  return types;
}

std::vector<WorkView> work_of(const graph::Graph& graph, int64_t index) {
  std::vector<WorkView> work;
  for (const graph::Work& part : ops::work_of(view_of(graph, index))) {
    work.push_back({std::string(graph::name_of(part)), graph::flops(part),
                    graph::bytes(part)});
  }
  return work;
}

// An operation that a product may include; see dense::MatmulSpec.
enum class Fusion { kRelu, kMask, kUpdate };

bool product_can_fuse(Fusion what, const std::string& dtype, const Shape& a,
                      const Strides& a_strides, const Shape& b,
                      const Strides& b_strides) {
  const DType type = dtype_from_name(dtype);
  return ops::kernels().can_fuse({.m = a.at(0),
                                  .n = b.at(1),
                                  .k = a.at(1),
                                  .a = {0, a_strides.at(0), a_strides.at(1)},
                                  .b = {0, b_strides.at(0), b_strides.at(1)},
                                  .operand_type = type,
                                  .result_type = type,
                                  .relu = what == Fusion::kRelu,
                                  .mask = what == Fusion::kMask,
                                  .update = what == Fusion::kUpdate});
}

void bind_dense(py::module_& m) {
  m.def("has_onednn", &dense::available);
  m.def("onednn_version", &dense::version);
  m.def("has_tile_units", [] { return ops::kernels().has_tile_units(); });
  m.def(
      "multiplies_tiles",
      [](int num_parts) { return ops::kernels().multiplies_tiles(num_parts); },
      py::arg("num_parts"));
  m.def(
      "emulate_tile_units",
      [](bool on) { return ops::kernels().emulate_tile_units(on); },
      py::arg("on"));
  m.def("num_emulated_products",
        [] { return ops::kernels().num_emulated_products(); });
  m.def("min_cut_work", [] { return dense::kMinCutWork; });
  py::enum_<Fusion>(m, "Fusion")
      .value("RELU", Fusion::kRelu)
      .value("MASK", Fusion::kMask)
      .value("UPDATE", Fusion::kUpdate);
  m.def("product_can_fuse", &product_can_fuse, py::arg("what"),
        py::arg("dtype"), py::arg("a"), py::arg("a_strides"), py::arg("b"),
        py::arg("b_strides"));
}

std::vector<std::string> names_of(
    const std::vector<processor::Target>& targets) {
  std::vector<std::string> names;
  for (const auto target : targets) {
    names.emplace_back(processor::name_of(target));
  }
  return names;
}

void choose_target(const std::string& name) {
  for (const auto target : processor::usable_targets()) {
    if (processor::name_of(target) != name) continue;
    processor::choose_target(target);
    return;
  }
  check_internal(false, "choose_target: '", name, "' is not usable");
}

void bind_targets(py::module_& m) {
  m.def("built_targets", [] { return names_of(processor::built_targets()); });
  m.def("usable_targets", [] { return names_of(processor::usable_targets()); });
  m.def("target", [] { return processor::name_of(processor::target()); });
  m.def("choose_target", &choose_target, py::arg("name"));
}

void bind_schema(py::module_& m) {
  py::class_<Operand>(m, "Operand")
      .def_readonly("name", &Operand::name)
      .def_property_readonly(
          "count", [](const Operand& self) { return name_of(self.count); })
      .def_readonly("has_gaps", &Operand::has_gaps)
      .def_readonly("counter", &Operand::counter)
      .def_property_readonly(
          "dtypes", [](const Operand& self) { return names_of(self.dtypes); })
      .def_readonly("memory", &Operand::memory)
      .def_readonly("written", &Operand::written);
  py::class_<AttributeRule>(m, "AttributeRule")
      .def_readonly("name", &AttributeRule::name)
      .def_property_readonly(
          "type", [](const AttributeRule& self) { return name_of(self.type); })
      .def_readonly("is_list", &AttributeRule::is_list)
      .def_readonly("length", &AttributeRule::length)
      .def_property_readonly("required",
                             [](const AttributeRule& self) {
                               return !self.optional && !self.default_value;
                             })
      .def_readonly("choices", &AttributeRule::choices)
      .def_readonly("least", &AttributeRule::least)
      .def_readonly("most", &AttributeRule::most);
  py::class_<Schema>(m, "Schema")
      .def_readonly("name", &Schema::name)
      .def_readonly("repeats", &Schema::repeats)
      .def_readonly("inputs", &Schema::inputs)
      .def_readonly("attributes", &Schema::attributes)
      .def_readonly("outputs", &Schema::outputs);
  m.def("parse_schema", &ops::parse_schema, py::arg("text"));
}

// As infer_types(), for an op whose types come from the user's own shape rule,
// which may be wrong.
std::optional<std::vector<Type>> custom_op_types(const graph::Graph& graph,
                                                 int64_t index) {
  std::vector<Type> types;
  for (const auto& type : ops::custom::types_of(view_of(graph, index))) {
    if (type.state != ops::TensorType::State::kKnown) return std::nullopt;
    types.emplace_back(name_of(type.dtype), type.shape);
  }
  return types;
}

void bind_custom_ops(py::module_& m) {
  py::class_<popsim_custom_op>(m, "CustomOp")
      .def_readonly("domain", &popsim_custom_op::domain)
      .def_readonly("name", &popsim_custom_op::name)
      .def_readonly("version", &popsim_custom_op::version)
      .def_property_readonly("has_gradient", [](const popsim_custom_op& self) {
        return self.gradient != nullptr;
      });
  m.def("look_for_custom_ops", &ops::custom::look_for_libraries,
        py::arg("files"));
  m.def("custom_ops", &ops::custom::all, py::return_value_policy::reference);
  m.def("find_custom_op", &ops::custom::find,
        py::return_value_policy::reference, py::arg("domain"), py::arg("name"),
        py::arg("version"));
  m.def(
      "add_custom_op",
      [](uintptr_t address) {
        ops::custom::add(reinterpret_cast<const popsim_custom_op*>(address));
      },
      py::arg("address"));
  m.def("custom_op_types", &custom_op_types, py::arg("graph"), py::arg("op"));
}

void bind_table(py::module_& m) {
  py::class_<OpDef>(m, "OpDef")
      .def_readonly("name", &OpDef::name)
      .def_readonly("text", &OpDef::schema)
      .def_property_readonly(
          "schema",
          [](const OpDef& self) { return ops::find_schema(self.name); })
      .def_readonly("family", &OpDef::family)
      .def_readonly("reuses_input", &OpDef::reuses_input)
      .def_readonly("cheap", &OpDef::cheap)
      .def_readonly("layer", &OpDef::layer)
      .def_readonly("exact", &OpDef::exact)
      .def_readonly("elementwise", &OpDef::elementwise)
      .def_readonly("only_overflows", &OpDef::only_overflows)
      .def_readonly("calls_host", &OpDef::calls_host)
      .def_readonly("in_order", &OpDef::in_order);
  py::class_<WorkView>(m, "Work")
      .def_readonly("kind", &WorkView::kind)
      .def_readonly("flops", &WorkView::flops)
      .def_readonly("bytes", &WorkView::bytes);
  m.def(
      "op_table",
      [] {
        return std::vector<const OpDef*>(ops::all_ops().begin(),
                                         ops::all_ops().end());
      },
      py::return_value_policy::reference);
  m.def("infer_types", &infer_types, py::arg("graph"), py::arg("op"));
  m.def("work_of", &work_of, py::arg("graph"), py::arg("op"));
}

}  // namespace

void bind_ops(py::module_& m) {
  bind_targets(m);
  bind_schema(m);
  bind_table(m);
  bind_custom_ops(m);
  bind_dense(m);
}

}  // namespace popsim::bindings
