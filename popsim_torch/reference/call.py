"""The context of an op in the interpreter, and the table of ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from popsim_torch.ir import Graph, LoopCounts, Op

Results = torch.Tensor | Sequence[torch.Tensor | None] | None
"""One result, or several (None for missing ones), or none."""
OpFunction = Callable[..., Results]

OPS: dict[str, OpFunction] = {}
"""Every op by its kind. Functions get a ``Call`` and the op's inputs, None for missing ones."""


def op(function: OpFunction) -> OpFunction:
    """Add a function to the table, under its own name."""
    OPS[function.__name__.removesuffix("_")] = function
    return function


def widened(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of wide runs for values of a dtype of the program."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


def grad_of(function: Callable[..., torch.Tensor], x: torch.Tensor, grad: Any) -> torch.Tensor:
    """Return the gradient of a function at ``x`` from the gradient of its result."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(function(leaf), leaf, grad)[0]


@dataclass(frozen=True)
class Position:
    """The current position in a run.

    Attributes:
        device_iteration: Device iteration, counted from 0 in each run.
        accumulation_step: Index of the micro-batch within the device iteration.
        step: Number of micro-batches begun since the program was loaded; in the body of a loop, a
            number that identifies the iteration.
    """

    device_iteration: int = 0
    accumulation_step: int = 0
    step: int = 0


@dataclass
class Record:
    """The results of a run besides the values of tensors.

    Attributes:
        returns: Entries by the index of the return, then by their number.
        sums: Returns that are sums, in float64 or int64.
        queues: Elements by queue, in the order in which they were enqueued.
        prints: Title and value of each print.
        ends: Whether the run ends after this device iteration.
    """

    returns: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)
    sums: dict[int, torch.Tensor] = field(default_factory=dict)
    queues: dict[int, list[tuple[torch.Tensor, ...]]] = field(default_factory=dict)
    prints: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    ends: bool = False


Foreign = Callable[[Op, Sequence[torch.Tensor | None]], Sequence[torch.Tensor | None]]
"""Runs an op whose code is not the program's: ``custom`` and ``host_call``."""


@dataclass(frozen=True)
class Run:
    """The data that all ops of a run share.

    Attributes:
        loop: How often a run executes the program.
        seed: The seed of random numbers.
        wide: Whether floating-point numbers are float64, and nothing is rounded.
        foreign: Runs the code of users.
        record: The results of the run.
        position: The current position.
    """

    loop: LoopCounts
    seed: int
    wide: bool
    foreign: Foreign | None
    record: Record
    position: Position = Position()

    def at(self, position: Position) -> Run:
        """Return the same run at another position."""
        return replace(self, position=position)

    def held(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype that stores values of the program's ``dtype``."""
        return widened(dtype) if self.wide else dtype

    def computed(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor in the dtype of computations: float32 for float16 and bfloat16."""
        if self.wide:
            return x.to(widened(x.dtype))
        return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


@dataclass(frozen=True)
class Call:
    """One execution of an op.

    Attributes:
        op: The op.
        run: The run.
        dtypes: Dtypes of its outputs in the program; None for missing ones.
        stored: Its inputs as stored in memory; functions get them widened (``Run.computed``).
        run_body: Runs one of the op's bodies: takes inputs and a position, returns the results.
    """

    op: Op
    run: Run
    dtypes: Sequence[torch.dtype | None]
    stored: Sequence[torch.Tensor | None]
    run_body: Callable[[Graph, Sequence[torch.Tensor], Position], list[torch.Tensor]]

    @property
    def attributes(self) -> Mapping[str, Any]:
        """The op's attributes; those with a default may be missing."""
        return self.op.attributes

    def __getitem__(self, name: str) -> Any:
        """Return an attribute that the op has."""
        return self.op.attributes[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute, or a default value if it is missing."""
        return self.op.attributes.get(name, default)

    def rounded(self, x: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        """Return numbers rounded to a dtype, unless the run is wide."""
        if self.run.wide or dtype is None or not dtype.is_floating_point:
            return x
        return x.to(dtype).to(x.dtype)
