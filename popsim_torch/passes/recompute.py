"""Recomputes forward values in the backward pass, so that they need not be kept until then.

Copies of the ops that computed a chosen value (``recompute_choice``) compute it again from kept
values: inputs, weights, constants, checkpoints, values of other stages and values that are not
chosen. The copies are directly before the first backward op that needs them, so values between two
kept values are recomputed only when backward gets there. The copy of a tensor ``t`` is called
``t__re``.

This pass runs before every other pass and before the returns. Anchors can ask for a copy by its
name, but do not influence which values are recomputed. Forward values that now only forward reads
are fused with the ops after them, and the copies with the backward ops that read them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from popsim_torch.ir import Graph, Op, Phase, Tensor, TensorKind, names, walk
from popsim_torch.ir.graph import NO_TENSOR
from popsim_torch.passes.recompute_choice import (
    Recomputation,
    Repeatable,
    choose_values,
    find_repeatable,
    values_inside_regions,
)


def recompute(
    graph: Graph,
    mode: Recomputation,
    checkpoints: Collection[int] = (),
    positions: Sequence[int] = (),
) -> int:
    """Recompute forward values where backward reads them, in place.

    Args:
        graph: The graph with its backward pass; the ops are in the order of their phases.
        mode: Which values, besides those inside of a region (``Origin.region``).
        checkpoints: Ids of tensors (not of views) that are kept.
        positions: The position of each stage in the pipeline; empty if no stages are concurrent.

    Returns:
        The number of ops that run again.
    """
    if mode == Recomputation.NONE and not any(op.origin.region for _, op in walk(graph)):
        return 0
    repeatable = find_repeatable(graph)
    chosen = choose_values(repeatable, mode, checkpoints, positions)
    chosen |= values_inside_regions(repeatable, checkpoints)
    return _Rebuilding(repeatable, chosen).run()


class _Rebuilding:
    def __init__(self, repeatable: Repeatable, chosen: Collection[int]) -> None:
        self._graph = repeatable.graph
        self._repeatable = repeatable
        self._chosen = chosen
        self._ops: list[Op] = []
        self._repeated: set[int] = set()  # indices of the ops that have a copy
        self._copies: dict[int, Tensor] = {}
        self._names: dict[int, list[str]] = defaultdict(list)
        self._named_views: dict[int, list[int]] = defaultdict(list)  # by the tensor that they view
        for name, tensor_id in self._graph.names.items():
            self._names[tensor_id].append(name)
        for tensor_id in self._names:
            tensor = self._graph.tensors[tensor_id]
            if tensor.kind == TensorKind.VIEW:
                self._named_views[tensor.base].append(tensor_id)

    def run(self) -> int:
        for op in self._graph.ops:
            if op.phase == Phase.BACKWARD:
                self._rebuild_for(op)
            self._ops.append(op)
        self._graph.ops = self._ops
        return len(self._repeated)

    def _rebuild_for(self, reader: Op) -> None:
        """Insert copies of the ops that a backward op needs before it; make it read the copies."""
        missing: set[int] = set()
        todo = self._rebuilt_inputs(reader)
        while todo:
            for position in self._repeatable.writers[todo.pop()]:
                if position not in self._repeated:
                    self._repeated.add(position)
                    missing.add(position)
                    todo += self._rebuilt_inputs(self._repeatable.ops[position])
        for position in sorted(missing):
            self._repeat(self._repeatable.ops[position])
        reader.inputs = self._as_read(reader)

    def _rebuilt_inputs(self, reader: Op) -> list[int]:
        return [
            root
            for root in self._repeatable.roots(reader.inputs)
            if root in self._chosen and self._repeatable.stage(root) == reader.stage
        ]

    def _as_read(self, reader: Op) -> list[int]:
        """Return the inputs of a backward op: copies for recomputed values."""
        rebuilt = set(self._rebuilt_inputs(reader))
        tensors = self._graph.tensors
        return [
            self._copy_of(tensors[i]).id
            if i != NO_TENSOR and self._graph.root_of(i).id in rebuilt
            else i
            for i in reader.inputs
        ]

    def _repeat(self, op: Op) -> None:
        inputs = self._as_read(op)
        outputs = [
            i if i == NO_TENSOR else self._copy_of(self._graph.tensors[i]).id for i in op.outputs
        ]
        self._ops.append(
            replace(
                op,
                inputs=inputs,
                outputs=outputs,
                attributes=dict(op.attributes),
                phase=Phase.BACKWARD,
                name=names.rebuilt(op.name),
            )
        )

    def _copy_of(self, tensor: Tensor) -> Tensor:
        if tensor.id in self._copies:
            return self._copies[tensor.id]
        if tensor.kind == TensorKind.VIEW:
            root = self._copy_of(self._graph.root(tensor))
            if tensor.id in self._copies:  # made with its root, because it has a name
                return self._copies[tensor.id]
            place = tensor.shape, tensor.strides, tensor.offset
            copy = self._graph.add_view(root, *place, dtype=tensor.dtype)
        else:
            copy = self._graph.add_tensor(TensorKind.VALUE, tensor.dtype, tensor.shape)
        self._copies[tensor.id] = copy
        self._give_names(copy, self._names.get(tensor.id, ()))
        for view in self._named_views.get(tensor.id, ()):
            self._copy_of(self._graph.tensors[view])
        return copy

    def _give_names(self, copy: Tensor, originals: Iterable[str]) -> None:
        for name in originals:
            if names.rebuilt(name) not in self._graph.names:
                self._graph.set_name(copy, names.rebuilt(name))
