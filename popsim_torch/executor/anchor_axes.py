"""``executor.anchor_axes(name)``: what the entries of an anchored tensor are."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from popsim_torch.anchors import AnchorRequest, kept_micro_batches
from popsim_torch.enums import OutputMode
from popsim_torch.errors import InternalError
from popsim_torch.executor.compiled_model import CompiledModel
from popsim_torch.ir import Graph

__all__ = ["AnchorAxes", "Axis", "RecordedAnchors", "axes_of_anchor"]


class Axis(NamedTuple):
    """An axis of an anchored tensor: a name, such as ``micro-batch``, and the number of entries."""

    name: str
    size: int


class AnchorAxes(tuple[Axis, ...]):
    """The axes of an anchored tensor, outermost first.

    ``value.reshape(axes.sizes)`` gives the tensor these axes.
    """

    __slots__ = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each axis."""
        return tuple(one.name for one in self)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size of each axis, for ``reshape``."""
        return tuple(one.size for one in self)

    def __repr__(self) -> str:
        return ", ".join(f"{name}: {size}" for name, size in self)

    __str__ = __repr__


class RecordedAnchors(Mapping[str, Any]):
    """The anchored tensors of a run of another program, by short name."""

    @abstractmethod
    def axes(self, short_name: str) -> Any:
        """Return the axes of an anchored tensor, as ``executor.anchor_axes`` does."""


def axes_of_anchor(compiled: CompiledModel, request: AnchorRequest, *, is_loop: bool) -> AnchorAxes:
    """Return the axes of what an anchor returns.

    Args:
        compiled: The program, which has the anchor.
        request: The request of the anchor.
        is_loop: Whether the program is a device loop: its device iterations are those of the loop.
    """
    anchor = compiled.program.anchors[request.short_name]
    axes = [
        *_axes_of_mode(compiled, request, is_loop=is_loop),
        Axis("replica", compiled.run.loop.replicas),
    ]
    graph = compiled.program.graph
    shape = graph.tensors[anchor.tensor].shape
    iterations = _iterations(graph, anchor.tensor)
    axes += [Axis("iteration", size) for size in iterations]
    own = shape[len(iterations) :]
    axes += [Axis(f"dimension {number}", size) for number, size in enumerate(own)]
    found = AnchorAxes(axes)
    if math.prod(found.sizes) != math.prod(anchor.shape):
        raise InternalError(
            f"anchor_axes: '{request.short_name}' has shape {anchor.shape}, and axes {found}"
        )
    return found


def _axes_of_mode(
    compiled: CompiledModel, request: AnchorRequest, *, is_loop: bool
) -> Iterator[Axis]:
    """Yield the axes for the micro-batches that a mode keeps; only All and EveryN have them."""
    if request.output_mode in (OutputMode.Final, OutputMode.Sum):
        return
    loop = compiled.run.loop
    iterations, steps = kept_micro_batches(
        request.output_mode,
        request.period,
        loop.device_iterations,
        loop.gradient_accumulation,
    )
    yield Axis("iteration" if is_loop else "device iteration", max(len(iterations), 1))
    yield Axis("micro-batch", len(steps))


def _iterations(graph: Graph, tensor: int) -> list[int]:
    """Return the sizes of the first axes of a tensor that hold the iterations of loops."""
    writer = next((op for op in graph.ops if tensor in op.outputs), None)
    if writer is None or not writer.bodies:
        return []
    position = writer.outputs.index(tensor)
    carried = writer.attributes.get("carried", 0)
    count = writer.attributes.get("count", 0)
    assert isinstance(carried, int) and isinstance(count, int)
    own = [count] if writer.kind == "loop" and position >= carried else []
    for body in writer.bodies:
        results = body.ops[-1].inputs
        inner = _iterations(body, results[position]) if position < len(results) else []
        if inner:
            return own + inner
    return own
