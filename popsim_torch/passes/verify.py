"""Checks the rules of graphs, after each step that changes a graph.

Most rules are in the device's library (``csrc/graph/verify.cpp``, ``csrc/ops/check.h``). This file
checks the rest: a tensor's id is its index, and a named tensor has a value, because it exists from
the start or is written.
"""

from __future__ import annotations

from popsim_torch import _native
from popsim_torch.errors import InternalError
from popsim_torch.ir import Graph, TensorKind, walk
from popsim_torch.passes.native_graph import to_native
from popsim_torch.passes.op_table import op_table

_MAX_DEPTH = 64


def verify(graph: Graph, *, in_flight: bool = False, types: bool = True) -> None:
    """Check tensors, ops, names, and the order of reads and writes.

    Args:
        graph: Any graph, complete or not: missing parts break no rule.
        in_flight: Whether several micro-batches are in flight at a time.
        types: Whether to check that the dtypes of results follow from the inputs. The shape rules
            of users' operators run their code, and those of PyTorch's operators run PyTorch.

    Raises:
        InternalError: It names the first tensor, name or op that breaks a rule.
    """
    _check_ids(graph, 0)
    with _native.translated_errors():
        to_native(graph).verify(in_flight, types)
    verify_names(graph)


def _check_ids(graph: Graph, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise InternalError(f"verify: a body is inside of more than {_MAX_DEPTH} others")
    for position, tensor in enumerate(graph.tensors):
        if tensor.id != position:
            raise InternalError(f"verify: tensor '{tensor.name}' has id {tensor.id} at {position}")
    for op in graph.ops:
        for body in op.bodies:
            _check_ids(body, depth + 1)


def verify_names(graph: Graph) -> None:
    """Check the names of a graph that fulfils all other rules, and of its bodies.

    Raises:
        InternalError: It names the first name that breaks a rule.
    """
    table = op_table()
    written = {
        root.id
        for _, op in walk(graph)
        if not table[op.kind].sees_inputs
        for root in graph.roots(op.outputs)
    }
    for name, tensor_id in graph.names.items():
        if not 0 <= tensor_id < len(graph.tensors):
            raise InternalError(f"verify: the name '{name}' belongs to no tensor")
        root = graph.root_of(tensor_id)
        if root.kind == TensorKind.VALUE and root.id not in written:
            raise InternalError(f"verify: nothing writes the tensor that is named '{name}'")
    for op in graph.ops:
        for body in op.bodies:
            verify_names(body)
