#include <sstream>

#include "base/check.h"
#include "graph/graph.h"

namespace popsim::graph {
namespace {

void print_tensor(std::ostream& out, const Graph& graph, TensorId id) {
  if (id == kNoTensor) {
    out << "-";
    return;
  }
  const Tensor& t = graph.tensor(id);
  out << "%" << id << ":" << popsim::name_of(t.dtype)
      << popsim::to_string(t.shape);
}

// String attributes say what an op does; numbers mostly repeat shapes.
void print_words(std::ostream& out, const Op& op) {
  const char* comma = op.inputs.empty() ? "" : ", ";
  for (const auto& [name, value] : op.attributes) {
    const auto* word = std::get_if<std::string>(&value);
    if (word != nullptr && !word->empty()) {
      out << comma << name << "=" << *word;
      comma = ", ";
    }
  }
}

void print_graph(std::ostream& out, const Graph& graph,
                 const std::string& indent) {
  for (const Op& op : graph.ops()) {
    out << indent;
    for (size_t i = 0; i < op.outputs.size(); ++i) {
      if (i > 0) out << ", ";
      print_tensor(out, graph, op.outputs[i]);
    }
    out << (op.outputs.empty() ? "" : " = ") << op.kind << "(";
    for (size_t i = 0; i < op.inputs.size(); ++i) {
      if (i > 0) out << ", ";
      print_tensor(out, graph, op.inputs[i]);
    }
    print_words(out, op);
    out << ")  # " << op.name << ", " << name_of(op.phase) << ", stage "
        << op.stage << "\n";
    for (size_t i = 0; i < op.bodies.size(); ++i) {
      out << indent << "  body " << i << ":\n";
      print_graph(out, *op.bodies[i], indent + "    ");
    }
  }
}

}  // namespace

std::string_view name_of(Phase phase) {
  switch (phase) {
    case Phase::kSetup:
      return "setup";
    case Phase::kForward:
      return "forward";
    case Phase::kBackward:
      return "backward";
    case Phase::kUpdate:
      return "update";
  }
  throw InternalError("name_of: not a phase");
}

std::string describe(const Op& op) { return join(op); }

std::ostream& operator<<(std::ostream& out, const Op& op) {
  out << "'" << op.name << "' (" << op.kind;
  if (!op.source.empty()) out << ", " << op.source;
  return out << ")";
}

std::string to_string(const Graph& graph) {
  std::ostringstream out;
  print_graph(out, graph, "");
  return out.str();
}

}  // namespace popsim::graph
