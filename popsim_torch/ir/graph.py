"""Tensors, ops and the graph that contains them."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter

import torch

from popsim_torch.ir.origin import NOWHERE, Origin

NO_TENSOR = -1
"""In ``Op.inputs``: an optional input that is left out. In ``Op.outputs``: an unread result."""


class TensorKind(enum.Enum):
    """The source of a tensor's memory."""

    INPUT = "input"
    """The caller's memory, one slice per micro-batch."""
    CONSTANT = "constant"
    """Written once, before the first run; ``Tensor.value`` has the data."""
    VARIABLE = "variable"
    """Kept between runs: weights, buffers, optimizer state, hyper-parameters."""
    VALUE = "value"
    """Written by an op."""
    VIEW = "view"
    """A view of another tensor's memory, with its own shape and strides."""


class Role(enum.Enum):
    """The role of a tensor in the user's model."""

    VALUE = "value"
    """A result of an op, or fixed data."""
    INPUT = "input"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    STATE = "state"
    """A state of the optimizer, for one parameter."""
    ACCUMULATOR = "accumulator"
    """The sum of the gradients of an update's micro-batches."""
    HYPER_PARAMETER = "hyper-parameter"
    UPDATED = "updated"
    """A weight, a state or an accumulator after the latest op that changes it."""


class Phase(enum.IntEnum):
    """The part of a run in which an op runs."""

    SETUP = 0
    """Once, before the first run: ops that depend only on constants."""
    FORWARD = 1
    """Every micro-batch."""
    BACKWARD = 2
    """For every micro-batch, after its forward."""
    UPDATE = 3
    """Once per device iteration."""


@dataclass(frozen=True, slots=True)
class TensorArgument:
    """An argument of an ATen operator: the op's input at this index."""

    input: int


@dataclass(frozen=True, slots=True)
class TensorListArgument:
    """A list argument of an ATen operator: indices of inputs, -1 for None."""

    inputs: tuple[int, ...]


Argument = (
    None
    | TensorArgument
    | TensorListArgument
    | bool
    | int
    | float
    | complex
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
        id: Index in ``Graph.tensors``.
        kind: The source of its memory.
        dtype: The dtype on the device.
        shape: The shape; for inputs and values that of one micro-batch.
        strides: Strides in elements. Tensors that own memory are contiguous.
        base: For views: the id of the tensor that owns the memory.
        offset: For views: number of elements from the start of ``base``.
        value: For constants: the data, on the CPU.
        name: The first name of the tensor, for messages.
        role: The role in the user's model.
        replica_groups: For variables that differ between groups of replicas: the group of each
            replica. Empty for others.
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
    replica_groups: tuple[int, ...] = ()

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements follow each other in memory, last dimension fastest."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    @property
    def host_shape(self) -> tuple[int, ...]:
        """The shape that the host sees: values of groups of replicas follow each other."""
        groups = self.replica_groups
        return (max(groups) + 1, *self.shape) if groups else self.shape

    @property
    def shape_of_numbers(self) -> tuple[int, ...]:
        """The shape of the real numbers: complex numbers are pairs along a new last axis."""
        return (*self.shape, 2) if self.dtype.is_complex else self.shape

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def memory_order(self) -> tuple[int, ...] | None:
        """The axes from the outermost in memory to the innermost, if the memory has no gaps.

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
        """Return whether the tensor is its whole memory, in order and of its dtype.

        The shape may be another one.

        Args:
            root: The tensor that owns the memory.
        """
        same = self.dtype == root.dtype and self.numel == root.numel
        return same and self.is_contiguous and self.offset == 0


@dataclass(slots=True)
class Op:
    """One operation.

    Attributes:
        kind: Name in the device's op registry.
        inputs: Tensor ids; ``NO_TENSOR`` for an optional input that is left out.
        outputs: Tensor ids; ``NO_TENSOR`` for unread results.
        attributes: The attributes that the registry entry requires.
        phase: The part of a run in which it runs.
        stage: The pipeline stage on which it runs.
        name: The name in messages and printed programs.
        origin: The user's call that it belongs to.
        bodies: The programs that it runs: the body of a loop, or the two of a branch. Each one has
            its own tensors. Its inputs, in the order of their ids, are the op's inputs or slices of
            them; its last op, ``yield``, has its results.
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


# `dataclasses.replace` would look these up again for each object.
_tensor_fields = attrgetter(*(one.name for one in fields(Tensor)))
_op_fields = attrgetter(*(one.name for one in fields(Op)))


class Graph:
    """A program: tensors, ops in execution order within their phase, and the tensors' names.

    One tensor may have several names (an unchanged gradient has the gradient name of every tensor
    whose gradient it is).
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
        """Add a tensor that owns its memory; give it the name ``name`` if it is not empty."""
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
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Add a view of the memory of ``source``.

        Args:
            source: The tensor to view; may be a view itself.
            shape: The shape of the view.
            strides: Strides of the view, in elements.
            offset: Number of elements from the start of the memory (not of ``source``).
            role: The role of the view in the user's model.
            dtype: The dtype of the view, in whose elements strides and offset count; None for that
                of ``source``. Complex numbers may be viewed as pairs of real ones, and vice versa.
        """
        root = self.root(source)
        sizes = tuple(int(size) for size in shape)
        tensor = Tensor(
            len(self.tensors),
            TensorKind.VIEW,
            dtype or source.dtype,
            sizes,
            tuple(int(stride) for stride in strides),
            base=root.id,
            offset=0 if 0 in sizes else int(offset),  # PyTorch's may be outside of the memory
            name=source.name,
            role=role,
        )
        self.tensors.append(tensor)
        return tensor

    def as_real(self, tensor: Tensor) -> Tensor:
        """Return the view of complex numbers as pairs, along a new last axis; others unchanged."""
        if not tensor.dtype.is_complex:
            return tensor
        return self.add_view(
            tensor,
            tensor.shape_of_numbers,
            (*(2 * stride for stride in tensor.strides), 1),
            2 * tensor.offset,
            role=tensor.role,
            dtype=tensor.dtype.to_real(),
        )

    def as_complex(self, pairs: Tensor) -> Tensor:
        """Return the view of contiguous pairs, along the last axis, as complex numbers."""
        return self.add_view(
            pairs,
            pairs.shape[:-1],
            (stride // 2 for stride in pairs.strides[:-1]),
            pairs.offset // 2,
            role=pairs.role,
            dtype=pairs.dtype.to_complex(),
        )

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
        """Append an op; None stands for an input that is left out or an unread result."""
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
        """Return a graph that can be changed independently of this one; both share the data."""
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
        """Return the tensor that owns the memory: ``tensor`` itself, or the base of a view."""
        return tensor if tensor.kind != TensorKind.VIEW else self.tensors[tensor.base]

    def root_of(self, tensor_id: int) -> Tensor:
        """Return the tensor that owns the memory of the one with this id."""
        return self.root(self.tensors[tensor_id])

    def roots(self, tensor_ids: Iterable[int]) -> Iterator[Tensor]:
        """Yield the owners of the memory of an op's inputs or outputs; skip missing ones."""
        return (self.root_of(i) for i in tensor_ids if i != NO_TENSOR)

    def set_name(self, tensor: Tensor, name: str) -> None:
        """Add a name to a tensor. Messages use its first name."""
        self.names[name] = tensor.id
        if not tensor.name or tensor.kind == TensorKind.VIEW:
            tensor.name = name
