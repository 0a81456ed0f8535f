"""The ops that read and write the tensors of a program."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterator, Sequence

from popsim_torch.ir.graph import Graph, Op, TensorKind


def walk(graph: Graph) -> Iterator[tuple[int, Op]]:
    """Yield every op of a program in the order of execution, with its index in ``graph.ops``.

    An op includes its bodies: tensors of the graph that they read count as inputs of the op.
    ``walk_all`` visits the bodies, too.
    """
    yield from enumerate(graph.ops)


def walk_all(graph: Graph) -> Iterator[tuple[Graph, Op]]:
    """Yield every op of a program with its graph, and after each op those of its bodies."""
    for op in graph.ops:
        yield graph, op
        for body in op.bodies:
            yield from walk_all(body)


def graphs(graph: Graph) -> Iterator[Graph]:
    """Yield a graph and the bodies of its ops, those inside of others first."""
    for op in graph.ops:
        for body in op.bodies:
            yield from graphs(body)
    yield graph


class Uses:
    """Readers and writers of a graph's tensors, at the time when this object is made.

    The memory counts: a tensor has the readers and writers of all its views.

    Args:
        graph: The graph. A pass that changes its ops must know which answers are still valid, or
            report the changes (``replace``).
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._position: dict[int, int] = {}  # by id
        self._readers: dict[int, list[Op]] = defaultdict(list)
        self._writers: dict[int, list[Op]] = defaultdict(list)
        self._gone: list[Op] = []  # kept alive, so that no new op gets the id of an old one
        for position, op in walk(graph):
            self._position[id(op)] = position
            for root in graph.roots(op.inputs):
                self._readers[root.id].append(op)
            for root in graph.roots(op.outputs):
                self._writers[root.id].append(op)

    def readers(self, tensor_id: int) -> Sequence[Op]:
        """Return the ops that read a tensor, in the order of execution, once for each read."""
        return self._readers.get(self._graph.root_of(tensor_id).id, ())

    def writers(self, tensor_id: int) -> Sequence[Op]:
        """Return the ops that write a tensor, in the order of execution, once for each write."""
        return self._writers.get(self._graph.root_of(tensor_id).id, ())

    def only_reader(self, tensor_id: int) -> Op | None:
        """Return the only reader of a tensor, if it reads the tensor once; else None."""
        readers = self.readers(tensor_id)
        return readers[0] if len(readers) == 1 else None

    def position(self, op: Op) -> int:
        """Return the index of an op among those of the program."""
        return self._position[id(op)]

    def replace(self, old: Op, new: Op | None) -> None:
        """Record that an op was replaced by another one, or removed (None)."""
        position = self._position.pop(id(old))
        self._gone.append(old)
        for users, tensor_ids in ((self._readers, old.inputs), (self._writers, old.outputs)):
            for root in self._graph.roots(tensor_ids):
                users[root.id] = [op for op in users[root.id] if op is not old]
        if new is None:
            return
        self._position[id(new)] = position
        for users, tensor_ids in ((self._readers, new.inputs), (self._writers, new.outputs)):
            for root in self._graph.roots(tensor_ids):
                bisect.insort(users[root.id], new, key=self.position)

    def reads_changed(self, op: Op) -> bool:
        """Return whether an op reads a variable that its phase changes: then it must not move."""
        return any(
            writer.phase == op.phase
            for root in self._graph.roots(op.inputs)
            if root.kind == TensorKind.VARIABLE
            for writer in self.writers(root.id)
        )
