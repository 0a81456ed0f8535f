"""Text tables that fit the width of the terminal."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

__all__ = ["table"]

_GAP = "  "
_LEAST_WIDTH = 8


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int | None = None,
    optional: Sequence[str] = (),
) -> str:
    """Return rows as aligned columns, with a line below the header.

    Columns are as wide as their cells. If the table is too wide, optional columns are left out,
    then the widest columns become narrower: longer cells are cut and end with ``..``.

    Args:
        header: The title of each column.
        rows: The cells, as many in each row as in the header.
        width: Width of the table (characters); None for the width of the terminal.
        optional: Titles of columns that may be left out; the first one is left out first.
    """
    limit = shutil.get_terminal_size().columns if width is None else width
    columns = list(zip(header, *rows, strict=True))
    for name in optional:
        if _total([max(map(len, column)) for column in columns]) > limit:
            columns = [column for column in columns if column[0] != name]
    widths = [max(map(len, column)) for column in columns]
    while _total(widths) > limit and max(widths) > _LEAST_WIDTH:
        widths[widths.index(max(widths))] -= 1
    first, *others = (_line(cells, widths) for cells in zip(*columns, strict=True))
    return "\n".join([first, "-" * _total(widths), *others])


def _total(widths: Sequence[int]) -> int:
    """Return the total width of the columns and the gaps between them."""
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    cut = (
        cell if len(cell) <= width else f"{cell[: width - 2]}.."
        for cell, width in zip(cells, widths, strict=True)
    )
    return _GAP.join(f"{cell:<{width}}" for cell, width in zip(cut, widths, strict=True)).rstrip()
