"""Loops and branches: from graphs of a trace to ops with bodies."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
import torch.fx

from popsim_torch.ir import Attribute, Graph, Phase, Tensor, TensorKind
from popsim_torch.lowering.emit.builder import Builder, Place, Value
from popsim_torch.trace.graph.bodies import Branch, Control, Loop, placeholders_of, results_of
from popsim_torch.trace.graph.origin import origin_of

__all__ = ["BodyBuilder", "lower_control"]

LowerNodes = Callable[["BodyBuilder", torch.fx.GraphModule], dict[str, Tensor]]


class BodyBuilder(Builder):
    """Builds the body of an op. What is fixed lies outside, and is one of the body's inputs.

    Args:
        outer: Builds the graph that the op stands in.
        nodes: The nodes that are lowered.
        named: Whether its tensors have names, or only gradients.

    Attributes:
        named: As given.
        outside: What the body is given besides what its function takes: tensors of ``outer``.
        twin: The other body of a branch, if there is one: it is given the same.
    """

    def __init__(self, outer: Builder, nodes: Collection[torch.fx.Node], named: bool) -> None:
        super().__init__(Graph(), set(nodes), outer.stream_of, outer.half_partials)
        self._outer = outer
        self.named = named
        self.outside: list[Tensor] = []
        self.twin: BodyBuilder | None = None

    def given(self, dtype: torch.dtype, shape: Sequence[int], name: str = "") -> Tensor:
        """Add an input."""
        return self.graph.add_tensor(TensorKind.INPUT, dtype, shape, name=name)

    def constant(self, value: torch.Tensor) -> Tensor:
        """Add a tensor with fixed data to the graph outside, and return the input that it is."""
        outside = self._outer.constant(value)
        self.outside.append(outside)
        if self.twin is not None:
            self.twin.outside.append(outside)
            self.twin.given(outside.dtype, outside.shape)
        return self.given(outside.dtype, outside.shape)

    def place_of(self, node: torch.fx.Node, name: str) -> Place:
        """Return where a node's ops belong: all ops of a body run in one go."""
        return Place(Phase.FORWARD, 0, name, origin_of(node))

    def yields(self, tensors: Sequence[Tensor]) -> None:
        """End the body, and name its results: each is given memory of its own."""
        results: list[Tensor] = []
        for tensor in tensors:
            written = self.written_in(tensor) is not None
            taken = any(tensor is other for other in results)
            if tensor.kind != TensorKind.VALUE or not written or taken:
                copy = self.value(tensor.dtype, tensor.shape)
                self.op("copy", [tensor], [copy], place=_END)
                tensor = copy
            results.append(tensor)
        self.op("yield", results, [], place=_END)

    def _when(self, *_: object) -> tuple[Phase, int]:
        return Phase.FORWARD, 0


_END = Place(Phase.FORWARD, 0, "yield")


class _Body:
    """A function that is being lowered.

    Args:
        function: The function.
        outer: Builds the graph that it is called in.
        control: What calls it.
    """

    def __init__(self, function: torch.fx.GraphModule, outer: Builder, control: Control) -> None:
        self._function = function
        named = outer.named and not control.is_gradient
        self.builder = BodyBuilder(outer, list(function.graph.nodes), named)
        for node in placeholders_of(function):
            value: torch.Tensor = node.meta["val"]
            self.builder.values[node] = self.builder.given(value.dtype, value.shape)

    def lower(self, lower_nodes: LowerNodes) -> dict[str, Tensor]:
        """Lower its nodes; return those of its tensors that it has to give out, by name."""
        return lower_nodes(self.builder, self._function)

    def finish(self, further: Sequence[Tensor]) -> Graph:
        """Return the body, with these results besides its own."""
        results = [self.builder.tensor(node) for node in results_of(self._function)]
        self.builder.yields([*results, *further])
        return self.builder.graph


def lower_control(
    builder: Builder,
    control: Control,
    inputs: Sequence[Tensor],
    place: Place,
    lower_nodes: LowerNodes,
) -> tuple[Value, dict[str, Tensor]]:
    """Add the op of a loop or branch.

    Args:
        builder: Builds the graph that it stands in.
        control: The loop or branch.
        inputs: What it reads.
        place: Where it belongs.
        lower_nodes: Lowers the nodes of a body, and returns what it has to give out.

    Returns:
        Its results, and the tensors that hold those asked for: of a loop, what they were in each
        trip; of a branch that is not taken, zeros.
    """
    inputs = [builder.contiguous(tensor, place) for tensor in inputs]
    if isinstance(control, Loop):
        return _loop(builder, control, inputs, place, lower_nodes)
    return _branch(builder, control, inputs, place, lower_nodes)


def _loop(
    builder: Builder,
    loop: Loop,
    inputs: Sequence[Tensor],
    place: Place,
    lower_nodes: LowerNodes,
) -> tuple[Value, dict[str, Tensor]]:
    body = _Body(loop.body, builder, loop)
    names = body.lower(lower_nodes)
    if loop.conditional or not loop.count:
        names = {}  # there is nothing, or nobody knows how much
    graph = body.finish(list(names.values()))
    results = [builder.value(dtype, shape) for shape, dtype in loop.types]
    stacks = {
        name: builder.value(tensor.dtype, (loop.count, *tensor.shape))
        for name, tensor in names.items()
    }
    attributes: dict[str, Attribute] = {
        "count": loop.count,
        "carried": loop.carried,
        "sliced": loop.sliced,
        "reverse": loop.reverse,
        "conditional": loop.conditional,
    }
    builder.op(
        "loop",
        [*inputs, *body.builder.outside],
        [*results, *stacks.values()],
        {key: value for key, value in attributes.items() if value or key in ("count", "carried")},
        place=place,
        fixed_phase=True,
        bodies=[graph],
    )
    return list(results), stacks


def _branch(
    builder: Builder,
    branch: Branch,
    inputs: Sequence[Tensor],
    place: Place,
    lower_nodes: LowerNodes,
) -> tuple[Value, dict[str, Tensor]]:
    bodies = [_Body(function, builder, branch) for function in branch.bodies]
    bodies[0].builder.twin, bodies[1].builder.twin = bodies[1].builder, bodies[0].builder
    found = [body.lower(lower_nodes) for body in bodies]
    names = found[0] | found[1]
    graphs = []
    for body, own in zip(bodies, found, strict=True):
        further = [own.get(name) or _zeros(body.builder, like) for name, like in names.items()]
        graphs.append(body.finish(further))
    results = [builder.value(dtype, shape) for shape, dtype in branch.types]
    seen = {name: builder.value(tensor.dtype, tensor.shape) for name, tensor in names.items()}
    builder.op(
        "branch",
        [*inputs, *bodies[0].builder.outside],
        [*results, *seen.values()],
        place=place,
        fixed_phase=True,
        bodies=graphs,
    )
    return list(results), seen


def _zeros(builder: BodyBuilder, like: Tensor) -> Tensor:
    """Return zeros in the place of a tensor of the other side."""
    return builder.constant(torch.zeros(like.shape, dtype=like.dtype, device="cpu"))
