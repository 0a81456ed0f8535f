"""Rules every graph keeps, checked after each step that changes one.

They are those of ``csrc/ops/check.h``, but for the shapes of results: those the device's library
computes. Who writes what:

* Inputs and constants are never written.
* A value is written by one op, before it is read.
* A variable is written on one pipeline stage in each phase, by ops that run one after the other:
  the body of a loop may update a weight more than once. In one phase nobody reads it on a stage
  that runs behind the one that changes it.
* A body keeps nothing: it has inputs, values and views. Its ops are those of one stage of a forward
  pass, and the last one yields values of its own.
* An op writes where none of its other operands lie. What it updates in place is an input and,
  seen once more, an output. A print sees its input and writes nothing.

A name belongs to a tensor that holds something: one that is there from the start, or is written.
"""

from __future__ import annotations

import math
from collections import defaultdict

from popsim_torch.errors import InternalError
from popsim_torch.ir.graph import NO_TENSOR, Graph, Op, Phase, Tensor, TensorKind
from popsim_torch.ir.schema import OpTable, check_op
from popsim_torch.ir.uses import walk

_OF_BODIES = (TensorKind.INPUT, TensorKind.VALUE, TensorKind.VIEW)
_MAX_DEPTH = 64
_NEVER_WRITTEN = (TensorKind.INPUT, TensorKind.CONSTANT)


def verify(graph: Graph, table: OpTable | None = None, *, depth: int = 0) -> None:
    """Check tensors, ops, names, and the order of reads and writes.

    Args:
        graph: Any, complete or not: what is not there breaks no rule.
        table: What the device knows of each kind of op. Without it nobody looks into ops, and one
            that reads what it writes counts as a reader.
        depth: How many ops the graph is inside of.

    Raises:
        InternalError: Naming the first tensor or op that breaks a rule.
    """
    for position, tensor in enumerate(graph.tensors):
        if tensor.id != position:
            raise InternalError(
                f"ir.verify: tensor '{tensor.name}' has id {tensor.id} at {position}"
            )
        _verify_tensor(graph, tensor)
    order = _Order(graph, table)
    phase_of_last = Phase.SETUP
    for _, op in walk(graph):
        _verify_place(graph, op, phase_of_last)
        phase_of_last = op.phase
        for body in op.bodies:
            _verify_body(op, body, table, depth + 1)
        if table is not None:
            check_op(graph, op, table)
        order.check(op)
    for name, tensor_id in graph.names.items():
        if not 0 <= tensor_id < len(graph.tensors):
            raise InternalError(f"ir.verify: the name '{name}' belongs to no tensor")
        if not order.holds_something(tensor_id):
            raise InternalError(f"ir.verify: nothing writes the tensor that is named '{name}'")


def _verify_body(owner: Op, body: Graph, table: OpTable | None, depth: int) -> None:
    where = f"ir.verify: a body of {owner.kind} '{owner.name}'"
    if depth > _MAX_DEPTH:
        raise InternalError(f"{where} is inside of more than {_MAX_DEPTH} others")
    if owner.phase == Phase.SETUP:
        raise InternalError(f"{where} is to run before the first run")
    verify(body, table, depth=depth)
    if any(tensor.kind not in _OF_BODIES for tensor in body.tensors):
        raise InternalError(f"{where} would have to keep a tensor")
    if any(op.phase != Phase.FORWARD or op.stage for op in body.ops):
        raise InternalError(f"{where} is not one stage of a forward pass")
    if [op.kind == "yield" for op in body.ops] != [False] * (len(body.ops) - 1) + [True]:
        raise InternalError(f"{where} does not end with the op that yields its results")
    results = body.ops[-1].inputs
    if len(set(results)) != len(results) or any(
        i == NO_TENSOR or body.tensors[i].kind != TensorKind.VALUE for i in results
    ):
        raise InternalError(f"{where} has a result without memory of its own")


def _verify_tensor(graph: Graph, tensor: Tensor) -> None:
    where = f"ir.verify: '{tensor.name}'"
    if min(tensor.shape, default=0) < 0 or len(tensor.shape) != len(tensor.strides):
        raise InternalError(
            f"{where} has shape {tensor.shape} and strides {tensor.strides}: no tensor has"
        )
    if tensor.kind != TensorKind.VIEW:
        if not tensor.is_contiguous:
            raise InternalError(f"{where} owns memory and is not contiguous")
        if tensor.base != NO_TENSOR or tensor.offset:
            raise InternalError(f"{where} owns memory and has a base")
        return
    if not 0 <= tensor.base < len(graph.tensors):
        raise InternalError(f"{where} is a view of tensor {tensor.base}, which is not there")
    base = graph.tensors[tensor.base]
    if base.kind == TensorKind.VIEW:
        raise InternalError(f"{where} is a view and has a view as its base")
    if tensor.dtype != base.dtype:
        raise InternalError(f"{where} has another element type than what it is a view of")
    reach = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True)
    )
    end = tensor.offset + (reach + 1 if math.prod(tensor.shape) else 0)
    if tensor.offset < 0 or min(tensor.strides, default=0) < 0 or end > base.numel:
        raise InternalError(f"{where} reaches outside of what it is a view of")


def _verify_place(graph: Graph, op: Op, phase_of_last: Phase) -> None:
    where = f"ir.verify: {op.kind} '{op.name}'"
    if op.phase < phase_of_last:
        raise InternalError(f"{where} ({op.phase.name}) stands after a later phase")
    if op.stage < 0:
        raise InternalError(f"{where} stands on stage {op.stage}")
    for tensor_id in (*op.inputs, *op.outputs):
        if tensor_id != NO_TENSOR and not 0 <= tensor_id < len(graph.tensors):
            raise InternalError(f"{where} names tensor {tensor_id}, which is not there")


class _Order:
    """Who has read and written what so far."""

    def __init__(self, graph: Graph, table: OpTable | None) -> None:
        self._graph = graph
        self._table = table
        # Stage of the writer, and the stage that reads last, by memory and phase.
        self._writers: dict[int, dict[Phase, int]] = defaultdict(dict)
        self._readers: dict[int, dict[Phase, int]] = defaultdict(dict)

    def holds_something(self, tensor_id: int) -> bool:
        root = self._graph.root_of(tensor_id)
        return root.kind != TensorKind.VALUE or root.id in self._writers

    def check(self, op: Op) -> None:
        for root in self._graph.roots(op.inputs):
            self._read(op, root)
        for root in self._written(op):
            self._write(op, root)

    def _written(self, op: Op) -> list[Tensor]:
        written = list(self._graph.roots(op.outputs))
        if self._table is not None:
            return [] if self._table[op.kind].sees_inputs else written
        read = [root.id for root in self._graph.roots(op.inputs)]
        return [root for root in written if root.id not in read]

    def _read(self, op: Op, root: Tensor) -> None:
        early = op.phase == Phase.SETUP and root.kind != TensorKind.CONSTANT
        if (early or root.kind == TensorKind.VALUE) and root.id not in self._writers:
            raise _misuse(op, "reads", root, "before it is written")
        writer = self._writers[root.id].get(op.phase) if root.id in self._writers else None
        if writer is not None and not _in_order(op.phase, writer, op.stage):
            raise _misuse(op, "reads", root, "on a stage that runs before the one that writes it")
        readers = self._readers[root.id]
        if not _in_order(op.phase, op.stage, readers.get(op.phase, op.stage)):
            readers[op.phase] = op.stage
        readers.setdefault(op.phase, op.stage)

    def _write(self, op: Op, root: Tensor) -> None:
        if root.kind in _NEVER_WRITTEN:
            raise _misuse(op, "writes", root, "which nothing may change")
        writers = self._writers[root.id]
        if (
            writers
            if root.kind == TensorKind.VALUE
            else writers.get(op.phase, op.stage) != op.stage
        ):
            raise _misuse(op, "writes", root, "a second time")
        reader = self._readers[root.id].get(op.phase, op.stage)
        if not _in_order(op.phase, reader, op.stage):
            raise _misuse(op, "writes", root, "before a later stage reads what was there")
        writers[op.phase] = op.stage


def _in_order(phase: Phase, first: int, second: int) -> bool:
    """Whether one stage's work in a phase is done before another's, or both are one stage."""
    if phase == Phase.FORWARD:
        return first <= second
    return phase != Phase.BACKWARD or first >= second


def _misuse(op: Op, what: str, root: Tensor, problem: str) -> InternalError:
    where = f"{op.kind} '{op.name}' ({op.phase.name.lower()}, stage {op.stage})"
    return InternalError(f"ir.verify: {where} {what} '{root.name or root.id}' {problem}")
