#include "ops/update/parts.h"

namespace popsim::ops::update {
namespace {

using Ids = std::vector<graph::TensorId>;

Ids part_of(const Ids& ids, size_t part, size_t num_parts) {
  const size_t size = ids.size() / num_parts;
  const auto begin = ids.begin() + static_cast<std::ptrdiff_t>(part * size);
  return {begin, begin + static_cast<std::ptrdiff_t>(size)};
}

}  // namespace

std::vector<graph::Op> split_into_parts(const OpCall& op) {
  if (!op.has_attribute("parameters")) return {op.op()};
  const auto num_parts =
      static_cast<size_t>(op.attribute<int64_t>("parameters"));
  const graph::Op& whole = op.op();
  std::vector<graph::Op> parts;
  for (size_t i = 0; i < num_parts; ++i) {
    parts.push_back({.kind = whole.kind,
                     .name = whole.name,
                     .inputs = part_of(whole.inputs, i, num_parts),
                     .outputs = part_of(whole.outputs, i, num_parts),
                     .attributes = whole.attributes,
                     .phase = whole.phase,
                     .stage = whole.stage});
  }
  return parts;
}

}  // namespace popsim::ops::update
