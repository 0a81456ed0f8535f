#include "machine/estimate/code_size.h"

#include <set>
#include <sstream>
#include <string>

#include "machine/constants.h"

namespace popsim::machine {
namespace {

// Equal for ops that the same code can run.
std::string code_key(const graph::Graph& graph, const graph::Op& op) {
  std::ostringstream key;
  key << op.kind << ' ' << static_cast<int>(op.phase == graph::Phase::kUpdate);
  for (const auto* ids : {&op.inputs, &op.outputs}) {
    key << '|';
    for (const graph::TensorId id : *ids) {
      if (id == graph::kNoTensor) continue;
      const graph::Tensor& tensor = graph.tensor(id);
      key << name_of(tensor.dtype) << to_string(tensor.shape);
    }
  }
  if (const auto code = op.attributes.find("code");
      code != op.attributes.end()) {
    if (const auto* lines =
            std::get_if<std::vector<std::string>>(&code->second)) {
      for (const std::string& line : *lines) key << line << ';';
    }
  }
  return key.str();
}

}  // namespace

int64_t code_bytes(const graph::Graph& graph,
                   const std::vector<int32_t>& ipu_of_op,
                   const std::vector<OpCost>& costs, int32_t ipu) {
  std::set<std::string> seen;
  double bytes = constants::kCodeBytes.value +
                 constants::kRandomStateBytes.value *
                     static_cast<double>(constants::kWorkers);
  for (size_t i = 0; i < graph.ops().size(); ++i) {
    const graph::Op& op = graph.ops()[i];
    if (ipu_of_op[i] != ipu || op.phase == graph::Phase::kSetup) continue;
    if (costs[i].cycles() == 0 || !seen.insert(code_key(graph, op)).second) {
      continue;
    }
    bytes += costs[i].exchanges ? constants::kExchangeCodeBytes.value
                                : constants::kOpCodeBytes.value;
  }
  return static_cast<int64_t>(bytes);
}

}  // namespace popsim::machine
