"""Rules every graph keeps, checked after each step that changes one."""

from __future__ import annotations

from popsim_torch.errors import InternalError
from popsim_torch.ir.graph import Graph, Op, Phase, TensorKind


def verify(graph: Graph) -> None:
    """Check ids, views, phases and that values are written before they are read.

    Raises:
        InternalError: Naming the first tensor or op that breaks a rule.
    """
    for position, tensor in enumerate(graph.tensors):
        if tensor.id != position:
            raise InternalError(
                f"ir.verify: tensor '{tensor.name}' has id {tensor.id} at {position}"
            )
        if tensor.kind == TensorKind.VIEW and graph.tensors[tensor.base].kind == TensorKind.VIEW:
            raise InternalError(f"ir.verify: view '{tensor.name}' has a view as its base")
        if tensor.kind != TensorKind.VIEW and not tensor.is_contiguous:
            raise InternalError(f"ir.verify: '{tensor.name}' owns memory and is not contiguous")
    for name, tensor_id in graph.names.items():
        if not 0 <= tensor_id < len(graph.tensors):
            raise InternalError(f"ir.verify: the name '{name}' belongs to no tensor")
    written = [t.kind not in (TensorKind.VALUE, TensorKind.VIEW) for t in graph.tensors]
    phase_of_last = Phase.SETUP
    for op in graph.ops:
        if op.phase < phase_of_last:
            raise InternalError(
                f"ir.verify: {op.kind} '{op.name}' ({op.phase.name}) stands after a later phase"
            )
        phase_of_last = op.phase
        _verify_op(graph, op, written)


def _verify_op(graph: Graph, op: Op, written: list[bool]) -> None:
    for root in graph.roots(op.inputs):
        if not written[root.id]:
            raise InternalError(
                f"ir.verify: {op.kind} '{op.name}' reads '{root.name or root.id}' before it is "
                "written"
            )
    for root in graph.roots(op.outputs):
        written[root.id] = True
