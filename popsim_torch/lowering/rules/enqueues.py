"""Ops that send values of a run to the host, and the op that ends a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.fx

from popsim_torch.dtypes import dtype_name, returned_dtype
from popsim_torch.ir import Phase, Role, Tensor, TensorKind
from popsim_torch.lowering.emit.builder import Builder, Place, Value
from popsim_torch.lowering.rules.rule import Rule
from popsim_torch.trace.graph.enqueues import ENQUEUE
from popsim_torch.trace.graph.markers import REPEAT_WHILE


def _enqueue(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    arguments: Any = node.args
    sources, key, *summed = arguments
    tensors = [builder.tensor(source) for source in sources]
    place = _behind(builder, tensors, place)
    if any(summed):
        tensors = [_summed(builder, x, place) for x in tensors]
        place = Place(Phase.UPDATE, 0, place.name, place.origin)
    builder.op(
        "enqueue",
        tensors,
        [],
        {"queue": int(key), "dtypes": [dtype_name(returned_dtype(x.dtype)) for x in tensors]},
        place=place,
        fixed_phase=True,
    )
    return None


def _repeat_while(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    condition = builder.tensor(node.args[0])
    place = _behind(builder, [condition], place)
    builder.op("repeat_while", [condition], [], place=place, fixed_phase=True)
    return None


def _summed(builder: Builder, tensor: Tensor, place: Place) -> Tensor:
    """Return the sum over the micro-batches of an update; the first one starts a new sum."""
    graph = builder.graph
    total = graph.add_tensor(TensorKind.VARIABLE, tensor.dtype, tensor.shape, role=Role.ACCUMULATOR)
    view = graph.add_view(total, total.shape, total.strides, total.offset, role=Role.VALUE)
    builder.op(
        "accumulate",
        [graph.as_real(tensor), graph.as_real(total)],
        [graph.as_real(view)],
        {"running": False},
        place=place,
        fixed_phase=True,
    )
    return total


def _behind(builder: Builder, tensors: Sequence[Tensor], place: Place) -> Place:
    """Return a place at which all tensors are computed."""
    written = [found for x in tensors if (found := builder.written_in(x)) is not None]
    if any(phase == Phase.BACKWARD for phase, _ in written):
        return Place(Phase.BACKWARD, place.stage, place.name, place.origin)
    return place


RULES: dict[Any, Rule] = {ENQUEUE: Rule(_enqueue), REPEAT_WHILE: Rule(_repeat_while)}
