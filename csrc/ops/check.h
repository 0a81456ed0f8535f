// Checks whether a program can run.
#pragma once

#include <vector>

#include "graph/graph.h"
#include "ops/op_def.h"

namespace popsim::ops {

// Throws InternalError for the first tensor or op that breaks a rule. The
// rules, in addition to those of graph::verify(), are:
// - ops (check_ops): the kind has an entry; the number, presence and dtypes of
//   inputs and outputs, and the names, types and values of attributes are those
//   of the schema; outputs have the types that the shape rule gives, have an
//   order in memory that the entry allows, and share no memory with other
//   inputs or outputs of the op;
// - order (check_order): no op writes inputs and constants, one op writes each
//   value, ops of one stage in each phase write a variable; values are written
//   before they are read, in the order in which stages run; no op reads a
//   variable on a later stage than the one that changes it; with several
//   micro-batches in flight, only the stage that changes a variable reads it;
//   setup ops depend only on constants.
// Without `types` no shape rule is called: the shape rules of other packages'
// operators run foreign code.
void verify(const graph::Graph& graph, bool in_flight, bool types = true);
void check_ops(const graph::Graph& graph, bool types);
void check_order(const graph::Graph& graph, bool in_flight);

// The types that the shape rule gives for an op whose inputs and attributes fit
// the schema. Throws InternalError if they do not fit.
[[nodiscard]] std::vector<TensorType> infer_types(const OpCall& op);

}  // namespace popsim::ops
