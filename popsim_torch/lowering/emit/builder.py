"""The graph under construction, and the helpers that every lowering rule uses."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.fx
from torch.fx.node import Argument

from popsim_torch.errors import Error, InternalError
from popsim_torch.ir import NOWHERE, Attribute, Graph, Origin, Phase, Tensor, TensorKind
from popsim_torch.trace.graph.origin import origin_of

Value = Tensor | None | list["Tensor | None"]
"""The result of a node: one tensor, none (an absent result), or several."""


@dataclass(frozen=True)
class Place:
    """When and where ops run, their name in messages, and the call they belong to."""

    phase: Phase
    stage: int
    name: str
    origin: Origin = NOWHERE

    @property
    def shown(self) -> str:
        """The name in messages, with the line of the user's code if it is known."""
        return f"'{self.name}'" + (f" ({self.origin.source})" if self.origin.source else "")


@dataclass(frozen=True)
class HalfPartials:
    """Which products of float16 operands have partial sums in float16."""

    matmul: bool = False
    convolution: bool = False


class Builder:
    """Adds tensors and ops to a graph, and records when each tensor is available.

    Args:
        graph: The graph to add to.
        needed: The nodes that are lowered; results that only other nodes read count as unread.
        stream_of: The random stream of each node that draws random numbers. It does not depend on
            the rest of the program: anchors, prints and stages change no number.
        half_partials: The products with float16 partial sums.

    Attributes:
        stream_of: See above.
        half_partials: See above.
        named: Whether the graph's tensors have names.
    """

    named = True

    def __init__(
        self,
        graph: Graph,
        needed: Iterable[torch.fx.Node],
        stream_of: Mapping[torch.fx.Node, int] = MappingProxyType({}),
        half_partials: HalfPartials = HalfPartials(),
    ) -> None:
        self.graph = graph
        self.half_partials = half_partials
        self.stream_of = dict(stream_of)
        self._needed = set(needed)
        self.values: dict[torch.fx.Node, Value] = {}
        # Phase and stage in which a tensor's memory is written; no entry if it exists before the
        # run.
        self._written: dict[int, tuple[Phase, int]] = {}
        self._contiguous: dict[tuple[int, Phase], Tensor] = {}
        self._as_images: dict[tuple[int, Phase], Tensor] = {}
        # Tensors that own the memory of images.
        self._images: set[int] = set()

    def tensor(self, argument: Argument) -> Tensor:
        """Return the tensor for an argument of a node, or for a node itself."""
        value = self.values.get(argument) if isinstance(argument, torch.fx.Node) else None
        if not isinstance(value, Tensor):
            raise InternalError(f"lowering: argument {argument!r} is not a single tensor")
        return value

    def need(self, *nodes: torch.fx.Node) -> None:
        """Count nodes that are not in the trace among those that are lowered."""
        self._needed.update(nodes)

    def new_stream(self, node: torch.fx.Node) -> None:
        """Give a node that draws random numbers a stream of its own."""
        self.stream_of[node] = max(self.stream_of.values(), default=-1) + 1

    def used_results(self, node: torch.fx.Node) -> set[int]:
        """Return which results of a node with several results are read."""
        return {int(u.args[1]) for u in node.users if u in self._needed}  # type: ignore[arg-type]

    def place_of(self, node: torch.fx.Node, name: str) -> Place:
        """Return the place of a node's ops, which its origin determines."""
        origin = origin_of(node)
        phase = Phase.BACKWARD if origin.backward else Phase.FORWARD
        return Place(phase, origin.stage, name, origin)

    def is_setup(self, tensor: Tensor) -> bool:
        """Return whether the tensor's value depends on constants only."""
        root = self.graph.root(tensor)
        if root.kind == TensorKind.CONSTANT:
            return True
        return self._written.get(root.id, (Phase.FORWARD, 0))[0] == Phase.SETUP

    def value(self, dtype: torch.dtype, shape: Iterable[int]) -> Tensor:
        """Add a tensor for an op to write."""
        return self.graph.add_tensor(TensorKind.VALUE, dtype, shape)

    def image(self, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """Add a tensor ``[batch, channels, height, width]`` with its channels last in memory.

        A contiguous tensor ``[batch, height, width, channels]`` owns the memory; the result is a
        view of it. So every op can read it, and ops without support for the layout get a copy.
        """
        batch, channels, height, width = (int(size) for size in shape)
        root = self.value(dtype, (batch, height, width, channels))
        self._images.add(root.id)
        return self._as_image(root)

    def _as_image(self, root: Tensor) -> Tensor:
        view = (root.shape[0], root.shape[3], root.shape[1], root.shape[2])
        strides = (root.strides[0], 1, root.strides[1], root.strides[2])
        return self.graph.add_view(root, view, strides, 0)

    def channels_last(self, tensor: Tensor) -> Tensor | None:
        """Return the memory owner of a whole tensor from ``image``; None for any other tensor."""
        root = self.graph.root(tensor)
        if root.id not in self._images or len(tensor.shape) != 4 or tensor.offset:
            return None
        batch, height, width, channels = root.shape
        strides = (root.strides[0], 1, root.strides[1], root.strides[2])
        same = tensor.shape == (batch, channels, height, width) and tensor.strides == strides
        return root if same else None

    def constant(self, value: torch.Tensor) -> Tensor:
        """Add a tensor with fixed data."""
        return self.graph.add_tensor(TensorKind.CONSTANT, value.dtype, value.shape, value=value)

    def op(
        self,
        kind: str,
        inputs: Sequence[Tensor | None],
        outputs: Sequence[Tensor | None],
        attributes: Mapping[str, Attribute] | None = None,
        *,
        place: Place,
        fixed_phase: bool = False,
        after: Tensor | None = None,
        bodies: Sequence[Graph] = (),
    ) -> None:
        """Add an op.

        Args:
            kind: Name in the op registry.
            inputs: The tensors that the op reads.
            outputs: The tensors that the op writes.
            attributes: The attributes that the registry entry requires.
            place: The place of the op. An op that reads only constants moves to the setup phase; a
                backward op moves to the earliest stage among its backward inputs.
            fixed_phase: Whether to keep the phase even if all inputs are constants (random ops,
                prints).
            after: Put the op directly after the op that wrote this tensor, not at the end.
            bodies: The bodies that the op repeats or chooses from.

        Raises:
            Error: A forward op reads a tensor of a later pipeline stage.
        """
        phase, stage = self._when(inputs, outputs, place, fixed_phase)
        for output in outputs:
            if output is not None:
                self._written[self.graph.root(output).id] = (phase, stage)
        self.graph.add_op(
            kind,
            inputs,
            outputs,
            attributes,
            phase=phase,
            stage=stage,
            name=place.name,
            origin=place.origin,
            bodies=bodies,
        )
        if after is not None:
            self.move_last_op_after(after)

    def _when(
        self,
        inputs: Sequence[Tensor | None],
        outputs: Sequence[Tensor | None],
        place: Place,
        fixed_phase: bool,
    ) -> tuple[Phase, int]:
        """Return phase and stage of an op."""
        phase, stage = place.phase, place.stage
        present = [tensor for tensor in inputs if tensor is not None]
        writes_variable = any(
            out is not None and self.graph.root(out).kind != TensorKind.VALUE for out in outputs
        )
        if not fixed_phase and not writes_variable and all(map(self.is_setup, present)):
            phase, stage = Phase.SETUP, 0
        for tensor in present:
            written = self._written.get(self.graph.root(tensor).id)
            if written is None or written[0] != phase:
                continue
            if phase == Phase.BACKWARD:
                stage = min(stage, written[1])
            elif phase == Phase.FORWARD and written[1] > stage:
                raise Error(
                    f"Pipeline stages must not decrease along the data flow: {place.shown} on "
                    f"stage {stage} reads '{tensor.name or 'a tensor'}' of stage {written[1]}. "
                    "Assign it to the same or a later stage."
                )
        return phase, stage

    def move_last_op_after(self, tensor: Tensor) -> None:
        """Move the op that was added last directly after the op that wrote a tensor."""
        root = self.graph.root(tensor).id
        ops = self.graph.ops
        last = ops.pop()
        position = len(ops)
        for index, op in enumerate(ops):
            if any(written.id == root for written in self.graph.roots(op.outputs)):
                position = index + 1
        ops.insert(position, last)

    def written_in(self, tensor: Tensor) -> tuple[Phase, int] | None:
        """Return phase and stage of the op that wrote the tensor's memory last, if there is one."""
        return self._written.get(self.graph.root(tensor).id)

    def forget_copies(self, roots: Collection[int]) -> None:
        """Do not reuse copies of these tensors: their values are about to change."""
        for copies in (self._contiguous, self._as_images):
            for key in [k for k in copies if self.graph.root_of(k[0]).id in roots]:
                del copies[key]

    def contiguous(self, tensor: Tensor, place: Place) -> Tensor:
        """Return the tensor, copied if it is not contiguous in memory."""
        if tensor.is_contiguous:
            return tensor
        key = (tensor.id, place.phase)
        if key not in self._contiguous:
            copy = self.value(tensor.dtype, tensor.shape)
            self.op("copy", [tensor], [copy], place=place)
            self._contiguous[key] = copy
        return self._contiguous[key]

    def laid_out_like(self, tensor: Tensor, other: Tensor, place: Place) -> Tensor:
        """Return the tensor with channels last if ``other`` has channels last, else contiguous.

        Args:
            tensor: The tensor; copied if it has another layout.
            other: A tensor of the same shape.
            place: The place of a copy.
        """
        if self.channels_last(other) is None:
            return self.contiguous(tensor, place)
        if self.channels_last(tensor) is not None:
            return tensor
        key = (tensor.id, place.phase)
        if key not in self._as_images:
            copy = self.image(tensor.dtype, tensor.shape)
            self.op("copy", [tensor], [copy], place=place)
            self._as_images[key] = copy
        return self._as_images[key]

    def image_or_contiguous(self, tensor: Tensor, place: Place) -> Tensor:
        """Return the tensor, copied unless it is contiguous or has its channels last."""
        return tensor if self.channels_last(tensor) is not None else self.contiguous(tensor, place)


class BodyBuilder(Builder):
    """Builds the body of an op. Constants are outside, and are inputs of the body.

    Args:
        outer: The builder of the graph that contains the op.
        nodes: The nodes that are lowered.
        named: Whether all its tensors have names, or only gradients.

    Attributes:
        named: See above.
        outside: The inputs of the body besides those of its function: tensors of ``outer``.
        twin: The other body of a branch, if there is one: it has the same inputs.
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
        """Add a tensor with fixed data to the graph outside; return the body's input for it."""
        outside = self._outer.constant(value)
        self.outside.append(outside)
        if self.twin is not None:
            self.twin.outside.append(outside)
            self.twin.given(outside.dtype, outside.shape)
        return self.given(outside.dtype, outside.shape)

    def place_of(self, node: torch.fx.Node, name: str) -> Place:
        """Return the place of a node's ops: all ops of a body run together."""
        return Place(Phase.FORWARD, 0, name, origin_of(node))

    def yields(self, tensors: Sequence[Tensor]) -> None:
        """End the body, and name its results: each gets its own memory."""
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
