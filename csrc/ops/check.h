// Checks whether a program can run.
#pragma once

#include <vector>

#include "graph/graph.h"
#include "ops/op_def.h"

namespace popsim::ops {

// Throws InternalError for the first tensor or op that breaks a rule. Beside
// those of graph::verify():
// - ops (check_ops): the kind has an entry; number, presence and element types
//   of inputs and outputs, names, types and values of attributes are those of
//   the schema; outputs have the types that the shape rule gives, and lie in
//   memory as the entry allows, where no other input or output of the op lies;
// - order (check_order): inputs and constants are never written, values by one
//   op, variables on one stage in each phase; values are written before they
//   are read, in the order in which stages run; nobody reads a variable on a
//   later stage than the one that changes it; with several micro-batches in
//   flight, nobody reads a variable but where it is changed; what runs before
//   everything else depends on constants only.
// Without `types` no shape rule is called: the shape rules of other packages'
// operators run foreign code.
void verify(const graph::Graph& graph, bool in_flight, bool types = true);
void check_ops(const graph::Graph& graph, bool types);
void check_order(const graph::Graph& graph, bool in_flight);

// The types that the shape rule gives for an op whose inputs and attributes fit
// the schema. Throws InternalError if they do not fit.
[[nodiscard]] std::vector<TensorType> infer_types(const OpCall& op);

}  // namespace popsim::ops
