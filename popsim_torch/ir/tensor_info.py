"""What is known about the named tensors of a program."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from popsim_torch import logs
from popsim_torch.errors import Error
from popsim_torch.ir import names
from popsim_torch.ir.graph import Op, Phase, Role, Tensor
from popsim_torch.ir.program import Program
from popsim_torch.ir.selecting import choose, info_of_name, module_of_name, near_names
from popsim_torch.tensors import TensorInfo
from popsim_torch.tensors.selections import as_selection, is_plain_name, words_of

__all__ = ["select_tensors", "tensor_infos"]

_GIVEN = {
    Role.INPUT: "input",
    Role.PARAMETER: "weight",
    Role.BUFFER: "buffer",
    Role.STATE: "optimizer state",
    Role.ACCUMULATOR: "optimizer state",
    Role.HYPER_PARAMETER: "hyper-parameter",
}
"""The kinds of tensors that are there before a micro-batch runs."""
_UPDATED = {Role.PARAMETER: "updated weight", Role.BUFFER: "updated buffer"}
_OF_PHASE = {Phase.BACKWARD: "recomputed", Phase.UPDATE: "update"}


def tensor_infos(program: Program, wanted: Iterable[str] | None = None) -> list[TensorInfo]:
    """Describe tensors of a program.

    Args:
        program: The program that is the same on every machine.
        wanted: Names of the tensors, from ``program.tensor_names()``; None for all of them, in the
            order in which the program computes them.
    """
    described = _Described(program)
    if wanted is not None:
        return [described.info(name) for name in wanted]
    return sorted(map(described.info, program.tensor_names()), key=described.position)


def select_tensors(
    program: Program, select: Any, where: str = "names", said: set[str] | None = None
) -> list[TensorInfo]:
    """Return the tensors of a program that a selection means, as the program computes them.

    A part of the selection that means no tensor is a warning, with near names.

    Args:
        program: The program that is the same on every machine.
        select: A selection, see ``popsim_torch.tensors``; None for all tensors.
        where: The caller, for messages.
        said: The parts that had such a warning before, which is not repeated; further ones are
            added. A name without wildcards then has a warning, too.

    Raises:
        Error: The selection is a name without wildcards, no tensor has it, and ``said`` is None.
        UsageTypeError: It is no selection.
        UsageValueError: It is an empty list.
    """
    infos = tensor_infos(program)
    if select is None:
        return infos
    chosen = choose(as_selection(where, select), infos)
    known = [one.name for one in infos]
    is_required = is_plain_name(select) and said is None
    said = set() if said is None else said
    for part in chosen.idle:
        words = words_of(part)
        if words in said:
            continue
        said.add(words)
        near = ", ".join(map(repr, near_names(part, known)))
        if is_required:
            raise Error(
                f"{where}: no tensor named {select!r} among the {len(known)} tensors of this "
                f"graph.{names.why_missing(select)} Near names: {near}."
            )
        logs.python.warning(
            "%s: %s matches none of the %d tensors of this graph; near names: %s.",
            *(where, words, len(known), near),
        )
    return list(chosen.tensors)


class _Described:
    """Describes tensors by name.

    Args:
        program: Their program.
    """

    def __init__(self, program: Program) -> None:
        self._graph = graph = program.graph
        self._offered = program.offers.names
        self._makers: dict[int, Op] = {i: op for op in graph.ops for i in op.outputs}
        self._first_readers: dict[int, Op] = {}
        self._positions: dict[int, int] = {}
        for position, op in enumerate(graph.ops):
            for root in graph.roots(op.inputs):
                self._first_readers.setdefault(root.id, op)
            for i in op.outputs:
                self._positions[i] = position

    def info(self, name: str) -> TensorInfo:
        """Return what is known about a tensor."""
        if name not in self._graph.names:
            return info_of_name(name)
        tensor = self._graph.tensors[self._graph.names[name]]
        root = self._graph.root(tensor)
        maker = self._makers.get(tensor.id, self._makers.get(root.id))
        is_given = tensor.role in _GIVEN
        op = self._first_readers.get(root.id) if is_given else maker
        made = Phase.FORWARD if maker is None else maker.phase
        kind, phase = _kind(name, tensor, root, made), made.name.lower()
        if name in self._offered:  # as before anybody asked for it
            kind, phase = names.kind_of(name)
        return TensorInfo(
            name,
            tensor.shape,
            tensor.dtype,
            kind,
            "setup" if is_given else phase,
            module_of_name(name),
            0 if op is None else op.stage,
            "" if op is None or is_given else op.origin.source,
        )

    def position(self, info: TensorInfo) -> int:
        """Return a number that orders tensors as the program computes them."""
        if info.shape is None:
            return len(self._graph.ops)
        if info.phase == "setup":
            return -1
        tensor = self._graph.names[info.name]
        root = self._graph.root_of(tensor).id
        return self._positions.get(tensor, self._positions.get(root, -1))


def _kind(name: str, tensor: Tensor, root: Tensor, made: Phase) -> str:
    if names.is_gradient(name):
        return "gradient"
    if tensor.role == Role.UPDATED:
        return _UPDATED.get(root.role, "optimizer state")
    return _GIVEN.get(tensor.role) or _OF_PHASE.get(made, "activation")
