"""Tensors, ops and the graph that holds them."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter

import torch

from popsim_torch.ir.origin import NOWHERE, Origin

NO_TENSOR = -1
"""In ``Op.inputs``: an optional input that is left out. In ``Op.outputs``: nobody reads it."""


class TensorKind(enum.Enum):
    """Where a tensor's memory comes from."""

    INPUT = "input"
    """The caller's memory, one slice per micro-batch."""
    CONSTANT = "constant"
    """Written once, before the first run; ``Tensor.value`` holds the data."""
    VARIABLE = "variable"
    """Kept between runs: weights, buffers, optimizer state, hyper-parameters."""
    VALUE = "value"
    """Written by an op."""
    VIEW = "view"
    """Another tensor's memory, seen with its own shape and strides."""


class Role(enum.Enum):
    """What a tensor is to the user's model."""

    VALUE = "value"
    """What an op computes, or fixed data."""
    INPUT = "input"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    STATE = "state"
    """The optimizer's, of one parameter."""
    ACCUMULATOR = "accumulator"
    """Adds up the gradients of the micro-batches of an update."""
    HYPER_PARAMETER = "hyper-parameter"
    UPDATED = "updated"
    """A weight, a state or an accumulator as the latest op left it."""


class Phase(enum.IntEnum):
    """When an op runs."""

    SETUP = 0
    """Once, before the first run: what depends on constants only."""
    FORWARD = 1
    """Every micro-batch."""
    BACKWARD = 2
    """Every micro-batch, after its forward."""
    UPDATE = 3
    """Once per device iteration."""


@dataclass(frozen=True, slots=True)
class TensorArgument:
    """An argument of an ATen operator: the op's input at this position."""

    input: int


@dataclass(frozen=True, slots=True)
class TensorListArgument:
    """A list argument of an ATen operator: positions of inputs, -1 for None."""

    inputs: tuple[int, ...]


Argument = (
    None
    | TensorArgument
    | TensorListArgument
    | bool
    | int
    | float
    | str
    | list[bool]
    | list[int]
    | list[float]
)
Attribute = bool | int | float | str | list[int] | list[float] | list[str] | list[Argument]


@dataclass(slots=True)
class Tensor:
    """A tensor of the program.

    Attributes:
        id: Position in ``Graph.tensors``.
        kind: Where its memory comes from.
        dtype: Element type on the device.
        shape: Sizes, of one micro-batch for inputs and values.
        strides: In elements. Tensors that own memory are contiguous.
        base: For views: the id of the tensor that owns the memory.
        offset: For views: elements from the start of ``base``.
        value: For constants: the data, on the CPU.
        name: The first name it was given, for messages.
        role: What it is to the user's model.
    """

    id: int
    kind: TensorKind
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    base: int = NO_TENSOR
    offset: int = 0
    value: torch.Tensor | None = None
    name: str = ""
    role: Role = Role.VALUE

    @property
    def is_contiguous(self) -> bool:
        """Whether elements follow each other in memory, last dimension fastest."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def memory_order(self) -> tuple[int, ...] | None:
        """The axes from the outermost in memory to the innermost, if its elements fill a stretch.

        None for a tensor with gaps or repeated elements.
        """
        if self.is_contiguous:
            return tuple(range(len(self.shape)))
        axes = range(len(self.shape))
        order = tuple(sorted(axes, key=lambda axis: (-self.strides[axis], axis)))
        expected = 1
        for axis in reversed(order):
            if self.shape[axis] != 1 and self.strides[axis] != expected:
                return None
            expected *= self.shape[axis]
        return order

    def covers(self, root: Tensor) -> bool:
        """Whether the tensor is all of its memory, element by element, perhaps in another shape.

        Args:
            root: The tensor that owns the memory.
        """
        return self.is_contiguous and self.offset == 0 and self.numel == root.numel


@dataclass(slots=True)
class Op:
    """One operation.

    Attributes:
        kind: Name in the device's op registry.
        inputs: Tensor ids, ``NO_TENSOR`` for an optional input left out.
        outputs: Tensor ids, ``NO_TENSOR`` for results nobody reads.
        attributes: Whatever the registry entry asks for.
        phase: When it runs.
        stage: The pipeline stage it runs on.
        name: For messages and printing.
        origin: The user's call that it belongs to.
        bodies: Programs that it runs: what a loop repeats, what a branch chooses from. Each has
            tensors of its own. Its inputs, in the order of their ids, are the op's inputs or pieces
            of them; its last op, ``yield``, names its results.
    """

    kind: str
    inputs: list[int]
    outputs: list[int]
    attributes: dict[str, Attribute] = field(default_factory=dict)
    phase: Phase = Phase.FORWARD
    stage: int = 0
    name: str = ""
    origin: Origin = NOWHERE
    bodies: list[Graph] = field(default_factory=list)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides (elements) of a dense tensor of this shape, last dimension fastest."""
    strides = []
    stride = 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= size
    return tuple(reversed(strides))


# What `dataclasses.replace` would look up for each object anew.
_tensor_fields = attrgetter(*(one.name for one in fields(Tensor)))
_op_fields = attrgetter(*(one.name for one in fields(Op)))


class Graph:
    """A program: tensors, ops in execution order within their phase, and the tensors' names.

    One tensor may have several names (a gradient that is handed on unchanged has that of every
    tensor it is the gradient of).
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.ops: list[Op] = []
        self.names: dict[str, int] = {}

    def add_tensor(
        self,
        kind: TensorKind,
        dtype: torch.dtype,
        shape: Iterable[int],
        *,
        name: str = "",
        value: torch.Tensor | None = None,
        role: Role = Role.VALUE,
    ) -> Tensor:
        """Add a tensor that owns its memory and give it ``name``, if any."""
        sizes = tuple(int(size) for size in shape)
        tensor = Tensor(
            len(self.tensors),
            kind,
            dtype,
            sizes,
            contiguous_strides(sizes),
            value=value,
            role=role,
        )
        self.tensors.append(tensor)
        if name:
            self.set_name(tensor, name)
        return tensor

    def add_view(
        self,
        source: Tensor,
        shape: Iterable[int],
        strides: Iterable[int],
        offset: int,
        *,
        role: Role = Role.VALUE,
    ) -> Tensor:
        """Add a tensor in the memory that ``source`` lives in.

        Args:
            source: The tensor looked at; may be a view itself.
            shape: Sizes of the view.
            strides: Strides of the view, in elements.
            offset: Elements from the start of the memory (not of ``source``).
            role: What the view is to the user's model.
        """
        root = self.root(source)
        tensor = Tensor(
            len(self.tensors),
            TensorKind.VIEW,
            source.dtype,
            tuple(int(size) for size in shape),
            tuple(int(stride) for stride in strides),
            base=root.id,
            offset=int(offset),
            name=source.name,
            role=role,
        )
        self.tensors.append(tensor)
        return tensor

    def add_op(
        self,
        kind: str,
        inputs: Sequence[Tensor | None],
        outputs: Sequence[Tensor | None],
        attributes: Mapping[str, Attribute] | None = None,
        *,
        phase: Phase,
        stage: int = 0,
        name: str = "",
        origin: Origin = NOWHERE,
        bodies: Sequence[Graph] = (),
    ) -> Op:
        """Append an op; None stands for an input left out or a result nobody reads."""
        op = Op(
            kind,
            [NO_TENSOR if tensor is None else tensor.id for tensor in inputs],
            [NO_TENSOR if tensor is None else tensor.id for tensor in outputs],
            dict(attributes or {}),
            phase,
            stage,
            name,
            origin,
            list(bodies),
        )
        self.ops.append(op)
        return op

    def copy(self) -> Graph:
        """Return a graph that can be changed without changing this one; it shares data."""
        twin = Graph()
        twin.tensors = [Tensor(*_tensor_fields(tensor)) for tensor in self.tensors]
        twin.ops = [Op(*_op_fields(op)) for op in self.ops]
        for op in twin.ops:
            op.inputs, op.outputs = list(op.inputs), list(op.outputs)
            op.attributes = dict(op.attributes)
            op.bodies = [body.copy() for body in op.bodies]
        twin.names = dict(self.names)
        return twin

    def of_kind(self, kind: TensorKind) -> list[Tensor]:
        """Return the tensors of a kind, in the order of their ids."""
        return [tensor for tensor in self.tensors if tensor.kind == kind]

    def root(self, tensor: Tensor) -> Tensor:
        """Return the tensor that owns the memory: ``tensor`` itself or a view's base."""
        return tensor if tensor.kind != TensorKind.VIEW else self.tensors[tensor.base]

    def root_of(self, tensor_id: int) -> Tensor:
        """Return the tensor that owns the memory of the one with this id."""
        return self.root(self.tensors[tensor_id])

    def roots(self, tensor_ids: Iterable[int]) -> Iterator[Tensor]:
        """Yield the owners of the memory of what an op reads or writes, missing ones left out."""
        return (self.root_of(i) for i in tensor_ids if i != NO_TENSOR)

    def set_name(self, tensor: Tensor, name: str) -> None:
        """Add a name to a tensor. The first one is the one that messages use."""
        self.names[name] = tensor.id
        if not tensor.name or tensor.kind == TensorKind.VIEW:
            tensor.name = name
