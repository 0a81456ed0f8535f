"""Chooses which forward values the backward pass recomputes instead of keeping them.

A value can be recomputed if its ops read no tensor that the program changes in between (such as a
buffer that forward updates), and write only values. Random draws can be recomputed, because their
numbers are keyed. Prints and host calls are not repeated, and checkpoints are kept.

The rules of the modes:

* ``STANDARD``: values that are cheap to recompute - elementwise ops, copies, joins, gathers,
  softmax, layer and group norms - if that saves memory: the values that have to be kept instead
  take fewer bytes. So values after a product or a convolution are recomputed if backward needs the
  product's own result as well, and kept otherwise. Nothing is recomputed from recomputed values of
  another layer. For example, the sums along a residual network follow from one another cheaply;
  every other one is kept, because otherwise all would be in memory at once. Products, convolutions,
  pooling, recurrent layers, reductions, random draws and operators without their own op are kept.
* ``NORM``: the same for norms, and for the elementwise ops directly after them.
* ``PIPELINE``: everything except checkpoints and values from another stage. On the last stage,
  whose backward follows its forward directly, only values before a checkpoint: other values would
  be dropped and immediately computed again.
* ``ALL``: everything except checkpoints, values from another stage, and ops without inputs.

In every mode, this also applies to values that stay inside of a region of forward that user code
asks to recompute (``torch.utils.checkpoint``).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from popsim_torch.ir import Graph, Op, Operand, OpInfo, Phase, TensorKind, walk, walk_all
from popsim_torch.ir.graph import NO_TENSOR
from popsim_torch.passes.op_table import op_table
from popsim_torch.passes.stage_positions import stages_beside


class Recomputation(enum.IntEnum):
    """Which forward values are recomputed; the numbers of the back end's ``autoRecomputation``."""

    NONE = 0
    STANDARD = 1
    NORM = 2
    PIPELINE = 3
    ALL = 4


_RUNNING = "running_"
"""The names of the operands that a norm updates with every micro-batch."""


def _info(op: Op) -> OpInfo:
    return op_table()[op.kind]


def _is_noticed(op: Op) -> bool:
    """Return whether users see how often an op runs: prints, and calls of their code."""
    inside = (inner for body in op.bodies for _, inner in walk_all(body))
    parts = (_info(part) for part in (op, *inside))
    return any(part.sees_inputs or part.calls_host for part in parts)


def _is_cheap(op: Op) -> bool:
    return _info(op).cheap


def _is_whole_norm(op: Op) -> bool:
    return _info(op).family == "norm" and _is_cheap(op)


def _is_statistics(op: Op) -> bool:
    """Return whether an op computes the statistics of a norm whose other ops are elementwise."""
    return _info(op).family == "norm" and not _is_cheap(op)


@dataclass
class Repeatable:
    """The ops and values that can be computed again in the backward pass.

    Attributes:
        graph: The program.
        ops: Forward ops in the form of their second run, by their index in the graph.
        writers: Indices of the ops that write a value, by the value's id, in the graph's order.
    """

    graph: Graph
    ops: dict[int, Op] = field(default_factory=dict)
    writers: dict[int, list[int]] = field(default_factory=dict)

    def roots(self, tensor_ids: Iterable[int]) -> Iterator[int]:
        """Return the ids of the tensors that own the memory of the given ones."""
        return (root.id for root in self.graph.roots(tensor_ids))

    def stage(self, value: int) -> int:
        """Return the stage on which a value is computed."""
        return self.ops[self.writers[value][0]].stage

    def inputs(self, value: int) -> Iterator[int]:
        """Return the inputs of a value's ops."""
        for position in self.writers[value]:
            yield from self.roots(self.ops[position].inputs)


def find_repeatable(graph: Graph) -> Repeatable:
    """Find the forward values that can be recomputed in the backward pass with the same bits."""
    found = Repeatable(graph)
    changed = {
        root.id
        for _, op in walk(graph)
        if op.phase in (Phase.FORWARD, Phase.BACKWARD)
        for root in graph.roots(op.outputs)
        if root.kind == TensorKind.VARIABLE
    }
    for position, op in walk(graph):
        if op.phase != Phase.FORWARD or _is_noticed(op):
            continue
        repeated = _second_run(op)
        outputs = set(found.roots(repeated.outputs))
        for root in outputs:
            found.writers.setdefault(root, []).append(position)
        if changed.isdisjoint(found.roots(repeated.inputs)) and all(
            graph.tensors[root].kind == TensorKind.VALUE for root in outputs
        ):
            found.ops[position] = repeated
    found.writers = {
        root: positions
        for root, positions in found.writers.items()
        if all(position in found.ops for position in positions)
    }
    return found


def _second_run(op: Op) -> Op:
    """Return an op for its second run. Running statistics of norms are updated only once."""
    info = _info(op)
    return replace(
        op,
        inputs=_without_running(info.inputs, op.inputs),
        outputs=_without_running(info.outputs, op.outputs),
        attributes=dict(op.attributes),
    )


def _without_running(operands: Sequence[Operand], ids: Sequence[int]) -> list[int]:
    running = [position for position, operand in enumerate(operands) if _RUNNING in operand.name]
    return [NO_TENSOR if position in running else i for position, i in enumerate(ids)]


def choose_values(
    repeatable: Repeatable,
    mode: Recomputation,
    checkpoints: Collection[int],
    positions: Sequence[int] = (),
) -> set[int]:
    """Return the ids of the values to recompute where backward reads them on their stage.

    Args:
        repeatable: The values to choose from.
        mode: The rule.
        checkpoints: Ids of values that are kept in any case.
        positions: The position of each stage in the pipeline; empty if no stages are concurrent.
    """
    choice = _Choice(repeatable, checkpoints)
    match mode:
        case Recomputation.NONE:
            return set()
        case Recomputation.STANDARD:
            return choice.cheap(_is_cheap)
        case Recomputation.NORM:
            return choice.cheap(choice.is_norm)
        case Recomputation.PIPELINE:
            return choice.all_before_the_end(positions)
        case Recomputation.ALL:
            return {value for value in choice.free if any(True for _ in repeatable.inputs(value))}


def values_inside_regions(repeatable: Repeatable, checkpoints: Collection[int]) -> set[int]:
    """Return the ids of the values that only their own region reads in forward.

    Values that leave a region are kept: the next region is recomputed from them.

    Args:
        repeatable: The values to choose from.
        checkpoints: Ids of values that are kept in any case.
    """
    region_of = {
        value: repeatable.ops[positions[0]].origin.region
        for value, positions in repeatable.writers.items()
    }
    inside = {value for value, region in region_of.items() if region} - set(checkpoints)
    for _, op in walk(repeatable.graph):
        if op.phase == Phase.FORWARD:
            for root in repeatable.roots(op.inputs):
                if root in inside and op.origin.region != region_of[root]:
                    inside.remove(root)
    return inside


class _Choice:
    def __init__(self, repeatable: Repeatable, checkpoints: Collection[int]) -> None:
        self._repeatable = repeatable
        self._checkpoints = checkpoints
        self._graph = repeatable.graph
        self.free = [value for value in repeatable.writers if value not in checkpoints]
        self._layers = self._find_layers()
        # Values that exist in the backward pass in any case.
        self._read = set(checkpoints)
        for op in self._graph.ops:
            if op.phase == Phase.BACKWARD:
                self._read.update(repeatable.roots(op.inputs))
        normalised = self._behind(_is_statistics)
        self._norms = normalised | self._behind(_is_whole_norm) | self._maps_behind(normalised)

    def _behind(self, is_one: Callable[[Op], bool]) -> set[int]:
        """Return the results of these ops, and of the ``map`` ops that read them."""
        results = {
            value
            for value, positions in self._repeatable.writers.items()
            if any(is_one(self._repeatable.ops[position]) for position in positions)
        }
        return results | self._maps_behind(results)

    def _maps_behind(self, values: Collection[int]) -> set[int]:
        return {
            value
            for value, positions in self._repeatable.writers.items()
            if any(self._repeatable.ops[position].kind == "map" for position in positions)
            and any(read in values for read in self._repeatable.inputs(value))
        }

    def is_norm(self, op: Op) -> bool:
        """Return whether an op is a norm or an elementwise op directly after one."""
        return _is_cheap(op) and any(
            root in self._norms for root in self._repeatable.roots(op.outputs)
        )

    def cheap(self, is_cheap: Callable[[Op], bool]) -> set[int]:
        """Return the values that cheap ops can recompute from fewer bytes than the values take."""
        ops, writers = self._repeatable.ops, self._repeatable.writers
        cheap = {v for v in self.free if all(is_cheap(ops[p]) for p in writers[v])}
        wanted = [value for value in self.free if value in cheap and value in self._read]
        available = set(self._read)
        chosen: set[int] = set()
        for value in wanted:
            rebuilt, kept = self._way_to(value, cheap, chosen, available)
            if sum(map(self._bytes, kept)) < self._bytes(value):
                chosen |= rebuilt
                available |= kept
        return chosen

    def _way_to(
        self,
        value: int,
        cheap: Collection[int],
        chosen: Collection[int],
        available: Collection[int],
    ) -> tuple[set[int], set[int]]:
        """Return the values to recompute for a value, and the values to keep for that."""

        def place(root: int) -> tuple[int, int]:
            return self._repeatable.stage(root), self._layers[root]

        rebuilt: set[int] = {value}
        kept: set[int] = set()
        todo = list(self._repeatable.inputs(value))
        while todo:
            read = todo.pop()
            if read in rebuilt or not self._takes_memory(read):
                continue
            same_layer = read in cheap and place(read) == place(value)
            if read in chosen and not same_layer:
                kept.add(read)
            elif same_layer and read not in available:
                rebuilt.add(read)
                todo.extend(self._repeatable.inputs(read))
            elif read not in available:
                kept.add(read)
        return rebuilt, kept

    def _takes_memory(self, root: int) -> bool:
        """Return whether keeping a tensor for the backward pass needs additional memory."""
        return root in self._layers and self._graph.tensors[root].kind == TensorKind.VALUE

    def _find_layers(self) -> dict[int, int]:
        """Return the number of products and similar ops before each forward value."""
        layers: dict[int, int] = {}
        for op in self._graph.ops:
            if op.phase == Phase.FORWARD:
                read = (layers.get(root, 0) for root in self._repeatable.roots(op.inputs))
                layer = max(read, default=0) + _info(op).layer
                for root in self._repeatable.roots(op.outputs):
                    layers[root] = max(layer, layers.get(root, 0))
        return layers

    def _bytes(self, root: int) -> int:
        tensor = self._graph.tensors[root]
        return tensor.numel * tensor.dtype.itemsize

    def all_before_the_end(self, positions: Sequence[int]) -> set[int]:
        """Return all values except those between the last checkpoints and the loss."""
        stage = self._repeatable.stage
        last = max((op.stage for op in self._graph.ops if op.phase == Phase.FORWARD), default=0)
        ends = stages_beside(last, positions)
        towards: set[int] = set()
        todo = [v for v in self._checkpoints if v in self._repeatable.writers and stage(v) in ends]
        while todo:
            for read in self._repeatable.inputs(todo.pop()):
                if read in self._repeatable.writers and read not in towards:
                    towards.add(read)
                    todo.append(read)
        return {value for value in self.free if stage(value) not in ends or value in towards}
