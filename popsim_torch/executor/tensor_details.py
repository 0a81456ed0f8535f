"""The details that ``getTensorNames`` returns for the tensors of a program."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol, overload

import torch

from popsim_torch.dtypes import dtype_name
from popsim_torch.executor.table import table
from popsim_torch.ir import Phase, Program, Role, Tensor, names

__all__ = ["TensorDetails", "TensorNames", "TensorTable", "tensor_details"]

_OF_ROLE = {
    Role.INPUT: "input",
    Role.PARAMETER: "weight",
    Role.BUFFER: "buffer",
    Role.STATE: "optimizer state",
    Role.ACCUMULATOR: "optimizer state",
    Role.HYPER_PARAMETER: "hyper-parameter",
}
_UPDATED = {Role.PARAMETER: "updated weight", Role.BUFFER: "updated buffer"}
_OF_PHASE = {Phase.BACKWARD: "backward", Phase.UPDATE: "update"}


@dataclass(frozen=True)
class TensorDetails:
    """A tensor that can be anchored.

    Attributes:
        name: The second argument of ``Options.anchorTensor``.
        shape: The shape of one micro-batch; None for a tensor that exists only if it is anchored.
        dtype: The dtype on the device; None if ``shape`` is None.
        phase: ``input``, ``weight``, ``buffer``, ``forward``, ``gradient``, ``updated weight``,
            ``optimizer state``, ``hyper-parameter``. Rare ones are ``updated buffer``, ``backward``
            (a value that the backward pass recomputes), ``update`` (a part of the update), ``if
            anchored`` (a tensor without a shape).
    """

    name: str
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    phase: str


class TensorTable(list[TensorDetails]):
    """A list of tensors that prints as a table."""

    def __str__(self) -> str:
        return table(("Name", "Shape", "Type", "Phase"), [_cells(one) for one in self])


class TensorNames(Protocol):
    """The type of ``getTensorNames`` of an executor or a loop."""

    @overload
    def __call__(
        self, pattern: str | None = None, details: Literal[False] = False
    ) -> list[str]: ...
    @overload
    def __call__(self, pattern: str | None = None, *, details: Literal[True]) -> TensorTable: ...


def _cells(one: TensorDetails) -> tuple[str, str, str, str]:
    shape = "-" if one.shape is None else str(one.shape)
    return one.name, shape, "-" if one.dtype is None else dtype_name(one.dtype), one.phase


def tensor_details(program: Program, wanted: Iterable[str]) -> TensorTable:
    """Return the details of some tensors of a program.

    Args:
        program: The program that is the same on every machine.
        wanted: Names of the tensors, from ``program.tensor_names()``.
    """
    graph = program.graph
    phases = {i: op.phase for op in graph.ops for i in op.outputs}
    found = TensorTable()
    for name in wanted:
        if name not in graph.names:
            phase = "gradient" if names.is_gradient(name) else "if anchored"
            found.append(TensorDetails(name, None, None, phase))
            continue
        tensor = graph.tensors[graph.names[name]]
        phase = _phase(name, tensor, graph.root(tensor), phases)
        found.append(TensorDetails(name, tensor.shape, tensor.dtype, phase))
    return found


def _phase(name: str, tensor: Tensor, root: Tensor, phases: dict[int, Phase]) -> str:
    if names.is_gradient(name):
        return "gradient"
    if tensor.role == Role.UPDATED:
        return _UPDATED.get(root.role, "optimizer state")
    if tensor.role in _OF_ROLE:
        return _OF_ROLE[tensor.role]
    made = phases.get(tensor.id, phases.get(root.id, Phase.FORWARD))
    return _OF_PHASE.get(made, "forward")
