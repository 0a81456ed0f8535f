"""Groups the weight updates of a model, so that threads share all of its parameters at once.

Update ops of the same kind become one op, with the inputs and outputs of one parameter after the
other and the number of parameters as an attribute, if their schema has one (``OpInfo.repeats``).
The values are equal to the last bit: threads share blocks of elements, and the boundaries of the
blocks do not depend on other parameters.

Plain SGD is not grouped: it reads and writes so little that sharing gains nothing. If nothing else
in a step uses several threads, sharing would even move weights away from the core that needs them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from popsim_torch.ir import Graph, Op
from popsim_torch.ir.graph import NO_TENSOR
from popsim_torch.passes.op_table import op_table


def group_updates(graph: Graph) -> int:
    """Group update ops in place. A group takes the place of its first op.

    Args:
        graph: The complete graph, with returns: an op that reads the results of an update keeps its
            place before or after it.

    Returns:
        The number of ops that became part of another one.
    """
    groups: dict[object, _Group] = {}
    joined: list[list[Op]] = []
    ops: list[Op] = []
    for op in graph.ops:
        read, written = _roots(graph, op.inputs), _roots(graph, op.outputs)
        key = _key(op) if _counter(op) else None
        if key is not None:
            # What differs between groups of replicas is updated for each group.
            key = key, *{graph.tensors[root].replica_groups for root in written}
        if key in groups and groups[key].can_take(read, written):
            groups[key].members.append(op)
        else:
            ops.append(op)
            if key is not None:
                groups[key] = _Group([op])
                joined.append(groups[key].members)
        for group in groups.values():
            group.read |= read
            group.written |= written
    for members in joined:
        _join(members)
    num_gone = len(graph.ops) - len(ops)
    graph.ops = ops
    return num_gone


@dataclass
class _Group:
    """Ops that become one, and the tensors that they and the ops after the first one use."""

    members: list[Op]
    read: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)

    def can_take(self, read: set[int], written: set[int]) -> bool:
        """Return whether an op may run at the same time as the group's first op."""
        return not (written & self.read or written & self.written or read & self.written)


def _counter(op: Op) -> str:
    """Return the attribute with the number of parameters of an op; empty if it is always one."""
    return op_table()[op.kind].repeats


def _key(op: Op) -> object:
    """Return a key that is equal for ops of one group."""
    counter = _counter(op)
    attributes = {name: value for name, value in op.attributes.items() if name != counter}
    num_inputs = len(op.inputs) // _count(op)
    return op.kind, op.phase, op.stage, num_inputs, repr(sorted(attributes.items()))


def _count(op: Op) -> int:
    count: Any = op.attributes.get(_counter(op), 1)
    return int(count)


def _padded(op: Op, num_outputs: int) -> list[int]:
    """Return the outputs of an op, padded to the same number for each of its parameters."""
    old = len(op.outputs) // _count(op)
    missing = [NO_TENSOR] * (num_outputs - old)
    return [
        i
        for first in range(0, len(op.outputs), old)
        for i in [*op.outputs[first : first + old], *missing]
    ]


def _roots(graph: Graph, ids: Iterable[int]) -> set[int]:
    return {root.id for root in graph.roots(ids)}


def _join(ops: list[Op]) -> None:
    """Change the first op to the op of the whole group."""
    first, others = ops[0], ops[1:]
    if not others:
        return
    # Anchored terms come last; other parameters do not have them.
    num_outputs = max(len(op.outputs) // _count(op) for op in ops)
    first.inputs = [i for op in ops for i in op.inputs]
    first.outputs = [i for op in ops for i in _padded(op, num_outputs)]
    first.attributes = {**first.attributes, _counter(first): sum(map(_count, ops))}
    first.name = f"{first.name} and {len(others)} more"
