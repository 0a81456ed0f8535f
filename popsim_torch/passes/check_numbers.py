"""Adds ops that check numbers where they leave a model: outputs, and what its updates read.

A number that is NaN or infinite nearly always reaches the loss or the gradient of a weight. So it
is enough to look there, and the ops of the model stay fused. Before the update, the weights are
still those of the last device iteration. Updates that are fused with products never have their
gradients in memory; there the operands of the products are checked.

A loop whose body reads weights after ``optimizer.step()`` updates them in the middle of an
iteration. The device keeps a copy of them then, so it is enough to look behind these updates. These
checks, and those of the losses of a loop, are late: they note a bad number, and a later check
fails, when the micro-batches have put all their elements into queues.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from popsim_torch.ir import Graph, Op, Phase, Program, Role, Tensor, TensorKind
from popsim_torch.ir.graph import NO_TENSOR
from popsim_torch.passes.op_table import op_table

__all__ = ["CHECK", "WatchedTensors", "add_checks", "watched_tensors"]

CHECK = "finite"
"""The kind of the ops that check numbers."""

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_SUMS = "all_reduce"
_FAMILIES_THAT_LOOK = ("host", "observe")
_PER_MICRO_BATCH = (Phase.FORWARD, Phase.BACKWARD)
# Updates add up products of two numbers of this size, and multiply the sum by a third.
_LIMIT = 1e9
# The same for weights in float16, of which the largest is 65504.
_HALF_LIMIT = 256.0
_ALWAYS = -1.0


@dataclass(frozen=True)
class WatchedTensors:
    """The tensors of a program in which a bad number shows; ids of tensors.

    Attributes:
        outputs: The checked results of forward, and the losses of a loop.
        gradients: What the update reads: gradients, or the operands of their products.
        changed: The variables that the update changes.
        early: What updates in the middle of an iteration read and change.
    """

    outputs: tuple[int, ...]
    gradients: tuple[int, ...]
    changed: tuple[int, ...]
    early: tuple[int, ...]

    @property
    def all(self) -> tuple[int, ...]:
        """All of them."""
        return (*self.outputs, *self.gradients, *self.changed, *self.early)


def watched_tensors(program: Program, *, training: bool) -> WatchedTensors:
    """Return the tensors of a program in which a bad number shows.

    Args:
        program: A program, before or after it was fitted to a host.
        training: Whether it trains. Then only those outputs count that are one number, as a loss
            is; in inference all of them do.
    """
    graph = program.graph
    tensors = graph.tensors
    outputs = [op.inputs[0] for op in _returned_outputs(program, training=training)]
    outputs += [loss for loss, _ in _losses(program)]
    per_micro_batch = _written(graph, _PER_MICRO_BATCH)
    updates = list(_updates(graph))
    changed = {i for op in updates for i in _changed_by(graph, op)}
    gradients = [
        i
        for op in updates
        for i in op.inputs
        if i != NO_TENSOR
        and tensors[i].dtype in _DTYPES
        and (graph.root_of(i).kind == TensorKind.INPUT or graph.root_of(i).id in per_micro_batch)
    ]
    return WatchedTensors(
        tuple(_without_repeats(graph, outputs)),
        tuple(_without_repeats(graph, gradients)),
        tuple(
            i
            for i in sorted(changed)
            if graph.root_of(i).kind == TensorKind.VARIABLE and tensors[i].dtype in _DTYPES
        ),
        tuple(_around(graph, [op for op in graph.ops if _is_early_update(op)])),
    )


def add_checks(program: Program, *, training: bool, num_processes: int = 1) -> int:
    """Add the checks of a program, in place; a failing check ends the device iteration.

    Args:
        program: The program, after all passes that fit it to a host.
        training: Whether it trains.
        num_processes: The number of processes that run it together. If several train it, all of
            them have to end an iteration: they check only what is the same in all, the sums of
            gradients and what the update makes of them.

    Returns:
        The number of ops added.
    """
    graph = program.graph
    watched = watched_tensors(program, training=training)
    alone = num_processes == 1 or not training
    before = {
        id(op): _check(
            op.phase,
            op.stage,
            [graph.as_real(graph.tensors[op.inputs[0]]).id],
            name="check of an output",
        )
        for op in _returned_outputs(program, training=training)
        if alone and op.inputs[0] in watched.outputs
    }
    late = _late_checks(program) if alone else {}
    ops = [
        new
        for op in graph.ops
        for new in (before.get(id(op)), op, *late.get(id(op), ()))
        if new is not None
    ]
    update = [index for index, op in enumerate(ops) if op.phase == Phase.UPDATE]
    if update and watched.changed:
        sums = [index for index in update if ops[index].kind == _SUMS]
        first = sums[-1] + 1 if sums else update[0]
        ops.insert(update[-1] + 1, _after_update(watched))
        ops.insert(first, _before_update(graph, watched))
    elif watched.early:
        _add_last_check(ops, graph, watched)
    num_added = len(ops) - len(graph.ops)
    graph.ops = ops
    return num_added


def _returned_outputs(program: Program, *, training: bool) -> Iterator[Op]:
    """Yield the ops that return the outputs that are checked."""
    for op in program.returns[: len(program.outputs)]:
        tensor = program.graph.tensors[op.inputs[0]]
        is_number = tensor.numel == 1 or not training
        is_inexact = tensor.dtype in _DTYPES or tensor.dtype.is_complex
        if is_number and is_inexact and op.phase in _PER_MICRO_BATCH:
            yield op


def _losses(program: Program) -> Iterator[tuple[int, Op]]:
    """Yield the losses of a loop that are one number, each with the op that writes it.

    A loss that nothing reads is not computed, and one inside of a fused op has no memory.
    """
    graph = program.graph
    for i in dict.fromkeys(program.losses):
        root, tensor = graph.root_of(i), graph.tensors[i]
        writers = [op for op in graph.ops if root in graph.roots(op.outputs)]
        in_micro_batch = bool(writers) and writers[-1].phase in _PER_MICRO_BATCH
        if in_micro_batch and tensor.numel == 1 and tensor.dtype in _DTYPES:
            yield i, writers[-1]


def _updates(graph: Graph) -> Iterator[Op]:
    """Yield the ops of the update, without those that only show values or add up replicas."""
    for op in graph.ops:
        looks = op_table()[op.kind].family in _FAMILIES_THAT_LOOK
        if op.phase == Phase.UPDATE and op.kind != _SUMS and not looks:
            yield op


def _is_early_update(op: Op) -> bool:
    """Return whether an op updates a weight in the middle of a device iteration."""
    return op.phase == Phase.BACKWARD and any(
        one.name == "weight" and one.written for one in op_table()[op.kind].inputs
    )


def _late_checks(program: Program) -> dict[int, list[Op]]:
    """Return the checks that only note a bad number, by the ``id`` of the op that they follow."""
    checks: dict[int, list[Op]] = {}

    def add(op: Op, inputs: list[int], name: str) -> None:
        new = _check(op.phase, op.stage, inputs, late=True, name=name)
        checks.setdefault(id(op), []).append(new)

    for loss, writer in _losses(program):
        add(writer, [loss], "check of a loss")
    graph = program.graph
    updates: list[Op] = []
    for op, following in itertools.zip_longest(graph.ops, graph.ops[1:]):
        if not _is_early_update(op):
            continue
        updates.append(op)
        if following is None or not _is_early_update(following):
            add(op, list(_around(graph, updates)), "check of an early update")
            updates = []
    return checks


def _add_last_check(ops: list[Op], graph: Graph, watched: WatchedTensors) -> None:
    """Add a check to the end of a micro-batch, which fails if a late one has noted a number."""
    smallest = min(watched.early, key=lambda i: graph.tensors[i].numel)
    last = max(index for index, op in enumerate(ops) if op.phase == Phase.BACKWARD)
    ops.insert(last + 1, _check(Phase.BACKWARD, ops[last].stage, [smallest], name="last check"))


def _around(graph: Graph, updates: Sequence[Op]) -> Iterator[int]:
    """Yield what updates read and change, without hyper-parameters."""
    changed = {i for op in updates for i in _changed_by(graph, op)}
    roots = {root.id for op in updates for root in graph.roots(op.outputs)}
    read = [
        i
        for op in updates
        for i in op.inputs
        if i != NO_TENSOR
        and graph.root_of(i).id not in roots
        and graph.root_of(i).role != Role.HYPER_PARAMETER
    ]
    for i in _without_repeats(graph, [*read, *sorted(changed)]):
        if graph.tensors[i].dtype in _DTYPES:
            yield i


def _changed_by(graph: Graph, op: Op) -> Iterator[int]:
    """Yield the owners of the memory that an op writes; for complex numbers the views as pairs."""
    for i in op.outputs:
        if i != NO_TENSOR:
            root = graph.root_of(i)
            yield i if root.dtype.is_complex else root.id


def _written(graph: Graph, phases: Iterable[Phase]) -> set[int]:
    """Return the owners of the memory that ops of some phases write."""
    return {root.id for op in graph.ops if op.phase in phases for root in graph.roots(op.outputs)}


def _without_repeats(graph: Graph, tensor_ids: Iterable[int]) -> list[int]:
    """Return the ids without those of views of the same memory."""
    found: dict[object, int] = {}
    for i in tensor_ids:
        found.setdefault(_memory(graph, graph.tensors[i]), i)
    return list(found.values())


def _memory(graph: Graph, tensor: Tensor) -> object:
    root = graph.root(tensor).id
    if tensor.memory_order is not None:
        return root, tensor.offset, tensor.numel
    return root, tensor.offset, tensor.shape, tensor.strides


def _before_update(graph: Graph, watched: WatchedTensors) -> Op:
    """Return the op that checks gradients, and copies what a doubtful update changes."""
    scalars = {
        i
        for op in _updates(graph)
        for i in op.inputs
        if i != NO_TENSOR
        and graph.tensors[i].role == Role.HYPER_PARAMETER
        and graph.tensors[i].dtype in _DTYPES
    }
    divisors = sorted(i for i in scalars if "eps" in graph.tensors[i].name.lower())
    factors = sorted(scalars - set(divisors))
    return _check(
        Phase.UPDATE,
        0,
        [*watched.gradients, *factors, *watched.changed, *divisors],
        kept=len(watched.changed),
        divisors=len(divisors),
        limit=_limit(graph, watched),
        name="check before the update",
    )


def _after_update(watched: WatchedTensors) -> Op:
    return _check(Phase.UPDATE, 0, list(watched.changed), after=True, name="check after the update")


def _limit(graph: Graph, watched: WatchedTensors) -> float:
    """Return the size of gradients up to which an update gives numbers."""
    if any(op.attributes.get("centered") for op in _updates(graph)):
        return _ALWAYS  # the root of a variance that rounding may make negative
    if any(graph.tensors[i].dtype == torch.float16 for i in watched.changed):
        return _HALF_LIMIT
    return _LIMIT


def _check(
    phase: Phase,
    stage: int,
    inputs: list[int],
    *,
    kept: int = 0,
    divisors: int = 0,
    limit: float = 0.0,
    after: bool = False,
    late: bool = False,
    name: str,
) -> Op:
    attributes: dict[str, bool | int | float] = {
        "kept": kept,
        "divisors": divisors,
        "limit": limit,
        "after": after,
        "late": late,
    }
    return Op(CHECK, inputs, [], {**attributes}, phase, stage, name)
