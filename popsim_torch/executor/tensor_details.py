"""The table of tensors that ``getTensorNames`` and ``names`` return."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Protocol, overload

from popsim_torch.dtypes import dtype_name
from popsim_torch.executor.table import table
from popsim_torch.tensors import TensorInfo
from popsim_torch.tensors.selections import Select

__all__ = ["TensorNames", "TensorTable"]

_HEADER = ("Name", "Shape", "Type", "Kind", "Bytes", "Stage", "Line")
_OPTIONAL = ("Line", "Stage", "Bytes")
"""Columns that a narrow table leaves out."""


class TensorTable(list[TensorInfo]):
    """A list of tensors that prints as a table."""

    def __str__(self) -> str:
        return _table([(one.name, *_cells(one)) for one in self])

    def tree(self, width: int | None = None) -> str:
        """Return the tensors as text: a line for each module, and below it its tensors.

        Args:
            width: The width of the text (characters); None for the width of the terminal.
        """
        return _table(list(_tree(self)), width)


class TensorNames(Protocol):
    """The type of ``getTensorNames`` of an executor or a loop."""

    @overload
    def __call__(
        self, pattern: Select | None = None, details: Literal[False] = False
    ) -> list[str]: ...
    @overload
    def __call__(self, pattern: Select | None = None, *, details: Literal[True]) -> TensorTable: ...


def _table(rows: list[tuple[str, ...]], width: int | None = None) -> str:
    stages = [row[_HEADER.index("Stage")] for row in rows]
    if not set(stages) - {"", "0"}:  # a model without stages
        place = _HEADER.index("Stage")
        rows = [(*row[:place], *row[place + 1 :]) for row in rows]
        header = (*_HEADER[:place], *_HEADER[place + 1 :])
        return table(header, rows, width, _OPTIONAL)
    return table(_HEADER, rows, width, _OPTIONAL)


def _cells(one: TensorInfo) -> tuple[str, ...]:
    shape = "-" if one.shape is None else str(one.shape)
    dtype = "-" if one.dtype is None else dtype_name(one.dtype)
    size = "-" if one.bytes is None else f"{one.bytes:,}"
    return shape, dtype, one.kind, size, str(one.stage), one.source


def _tree(tensors: list[TensorInfo]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a tree: tensors without a module first, then module after module."""
    by_module: dict[str, list[TensorInfo]] = {}
    for one in tensors:
        parts = one.module.split(".") if one.module else []
        for depth in range(len(parts) + 1):  # outer modules stand before their inner ones
            by_module.setdefault(".".join(parts[:depth]), [])
        by_module[one.module].append(one)
    empty = ("",) * (len(_HEADER) - 1)
    for path in _in_order(by_module):
        depth = path.count(".") + 1 if path else 0
        if path:
            yield (f"{'  ' * (depth - 1)}{path.rpartition('.')[2]}", *empty)
        for one in by_module[path]:
            yield (f"{'  ' * depth}{one.name}", *_cells(one))


def _in_order(modules: dict[str, list[TensorInfo]]) -> list[str]:
    """Return the paths of modules, inner ones behind their module, otherwise as they came."""
    rank = {path: number for number, path in enumerate(modules)}

    def key(path: str) -> list[int]:
        parts = path.split(".") if path else []
        return [rank[".".join(parts[: depth + 1])] for depth in range(len(parts))]

    return sorted(modules, key=key)
