"""Adds statistics of chosen tensors to a copy of a program: its observed version."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from popsim_torch.ir import Op, Phase, Program, Role, Tensor, TensorKind
from popsim_torch.ir.graph import Attribute
from popsim_torch.passes.places import Place, Places
from popsim_torch.statistics import (
    Channels,
    Counts,
    Histogram,
    Moments,
    Request,
    attributes_of,
    length_of,
)

__all__ = ["ObservedBlock", "ObservedTensor", "add_observations"]


@dataclass(frozen=True)
class ObservedTensor:
    """A tensor whose statistics a program computes.

    Attributes:
        name: The name of the tensor.
        requests: The statistics.
        by_iteration: Whether there is one record for all micro-batches of a device iteration.
    """

    name: str
    requests: tuple[Request, ...]
    by_iteration: bool = False


@dataclass(frozen=True)
class ObservedBlock:
    """The tensors whose statistics one block of ops computes; they go into a queue of their own.

    An element has the position of the run (device iteration, micro-batch), int64, then vectors of
    statistics. Tensors that have the same values, in any order, share one.

    Attributes:
        phase: The phase of the ops.
        stage: Their stage.
        tensors: The tensors, in the order of the program.
        vectors: The number of the vector of each, among those of an element.
        lengths: The number of statistics of each vector.
    """

    phase: Phase
    stage: int
    tensors: tuple[ObservedTensor, ...]
    vectors: tuple[int, ...]
    lengths: tuple[int, ...]


def add_observations(
    program: Program, tensors: Sequence[ObservedTensor], first_queue: int
) -> list[ObservedBlock]:
    """Let a program compute statistics and put them into queues, in place.

    Args:
        program: A complete program, with its returns.
        tensors: The tensors; their names are among those of the graph.
        first_queue: The number of the first queue; the others follow, in the order of the result.

    Returns:
        The blocks that have queues.
    """
    graph, places = program.graph, _Places(program)
    found: dict[tuple[Phase, int], list[tuple[int, ObservedTensor]]] = defaultdict(list)
    for one in tensors:
        position, phase, stage = places.of(one.name, graph.tensors[graph.names[one.name]])
        found[phase, stage].append((position, one))
    behind: dict[int, list[Op]] = defaultdict(list)
    blocks: list[ObservedBlock] = []
    for (phase, stage), members in sorted(found.items()):
        members.sort(key=lambda member: member[0])
        block = _Block(program, phase, stage)
        for position, one in members:
            behind[position] += block.observe(one, position)
        end = max(places.end_of(phase, stage), members[-1][0])
        behind[end] += block.enqueue(first_queue + len(blocks))
        blocks.append(block.described())
    ops = behind.pop(-1, [])
    for position, op in enumerate(graph.ops):
        ops += [op, *behind.pop(position, [])]
    graph.ops = ops
    return blocks


class _Places(Places):
    """The places where values are observed: those of names, but weights once per update."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self._ends: dict[tuple[Phase, int], int] = {}
        self._before_update = -1
        self._updates = False
        for position, op in enumerate(program.graph.ops):
            self._ends[op.phase, op.stage] = position
            if op.phase == Phase.UPDATE and not self._updates:
                self._updates, self._before_update = True, position - 1

    def of(self, name: str, tensor: Tensor) -> Place:
        """Return the place after which to observe a tensor."""
        place = self.of_value(name, tensor)
        root = self._graph.root(tensor)
        if self._updates and root.kind == TensorKind.VARIABLE and tensor.role != Role.UPDATED:
            in_micro_batches = (Phase.FORWARD, Phase.BACKWARD)
            if all(op.phase not in in_micro_batches for op in self.uses.writers(root.id)):
                if place[1] == Phase.UPDATE:
                    return place
                # All micro-batches read the same value.
                return self._before_update, Phase.UPDATE, 0
        return place

    def end_of(self, phase: Phase, stage: int) -> int:
        """Return the index of the last op of a block; -1 if it has none."""
        return self._ends.get((phase, stage), -1)


# What does not depend on the order of the values.
_OF_ANY_ORDER = (Moments, Counts, Histogram)


class _Block:
    """Makes the ops of one block."""

    def __init__(self, program: Program, phase: Phase, stage: int) -> None:
        self._graph = program.graph
        self._phase, self._stage = phase, stage
        self._tensors: list[ObservedTensor] = []
        self._numbers: list[int] = []  # of the vector, by tensor
        self._vectors: list[Tensor] = []
        self._known: dict[object, int] = {}

    def observe(self, one: ObservedTensor, position: int) -> list[Op]:
        """Return the op that computes the statistics of a tensor; none if they are there already.

        Args:
            one: The tensor.
            position: The index of the op before.
        """
        tensor = self._graph.as_real(self._graph.tensors[self._graph.names[one.name]])
        key = (position, self._values_of(tensor, one.requests), frozenset(one.requests))
        number = self._known.setdefault(key, len(self._vectors))
        self._tensors.append(one)
        self._numbers.append(number)
        if number < len(self._vectors):
            return []
        length = length_of(one.requests, tensor.shape)
        vector = self._graph.add_tensor(TensorKind.VALUE, torch.float64, (length,))
        self._vectors.append(vector)
        attributes = attributes_of(one.requests, len(tensor.shape))
        return [self._op("statistics", [tensor.id], [vector.id], attributes, one.name)]

    def _values_of(self, tensor: Tensor, requests: Sequence[Request]) -> object:
        """Return what two tensors have in common whose statistics are the same."""
        root = self._graph.root(tensor)
        of_channels = any(isinstance(one, Channels) for one in requests)
        if tensor.dtype == root.dtype and not of_channels:
            if tensor.covers(root):
                return root.id
            order_is_free = all(isinstance(one, _OF_ANY_ORDER) for one in requests)
            is_whole = tensor.offset == 0 and tensor.numel == root.numel
            if order_is_free and is_whole and tensor.memory_order is not None:
                return root.id
        return root.id, tensor.dtype, tensor.offset, tensor.shape, tensor.strides

    def enqueue(self, queue: int) -> list[Op]:
        """Return the ops that put an element with all statistics into a queue."""
        position = self._graph.add_tensor(TensorKind.VALUE, torch.int64, (2,))
        ids = [position.id, *(vector.id for vector in self._vectors)]
        dtypes = ["int64"] + ["float64"] * len(self._vectors)
        return [
            self._op("position", [], [position.id], {}, "position"),
            self._op("enqueue", ids, [], {"queue": queue, "dtypes": dtypes}, "observe"),
        ]

    def described(self) -> ObservedBlock:
        """Return the description of the elements."""
        lengths = tuple(vector.numel for vector in self._vectors)
        return ObservedBlock(
            self._phase, self._stage, tuple(self._tensors), tuple(self._numbers), lengths
        )

    def _op(
        self,
        kind: str,
        inputs: list[int],
        outputs: list[int],
        attributes: Mapping[str, Attribute],
        name: str,
    ) -> Op:
        return Op(kind, inputs, outputs, {**attributes}, self._phase, self._stage, name)
