"""Tables of text that fit the terminal, and small tables for notebooks. Package private."""

from __future__ import annotations

import html
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence

_LEAST_NAME = 12
_CUT = "..."


def terminal_width() -> int | None:
    """Return the width of the terminal (characters), or None if stdout is not a terminal.

    Lines for a file or another program are not limited.
    """
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def table(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    widths: Sequence[int],
    *,
    fixed: int = 1,
    width: int | None = None,
) -> str:
    """Return a table with lines of at most some width; columns that do not fit go below.

    Args:
        header: A word for each column.
        rows: The cells of each line.
        widths: The widths of the columns (characters); cells are padded, with a space in between.
        fixed: How many of the first columns each part repeats if the columns do not fit side by
            side. The last of them is a name: its beginning is cut if there is no room.
        width: The largest width of the lines (characters); None for no limit.
    """
    lines = [header, *rows]
    sizes = list(widths)
    if width is None or sum(sizes) + len(sizes) - 1 <= width:
        return "\n".join(_line(line, sizes) for line in lines)
    room = width - sum(sizes[: fixed - 1]) - fixed - max(sizes[fixed:], default=0)
    longest = max(len(line[fixed - 1]) for line in lines)
    sizes[fixed - 1] = min(longest, max(room, _LEAST_NAME))
    front = list(range(fixed))
    parts = []
    for columns in _columns_that_fit(sizes, fixed, width):
        shown = [*front, *columns]
        part = [_line([line[c] for c in shown], [sizes[c] for c in shown]) for line in lines]
        parts.append("\n".join(text.rstrip() for text in part))
    return "\n\n".join(parts)


def _columns_that_fit(sizes: Sequence[int], fixed: int, width: int) -> list[list[int]]:
    """Return the other columns in parts, each with as many as fit beside the fixed ones."""
    used = front = sum(sizes[:fixed]) + fixed - 1
    parts: list[list[int]] = [[]]
    for column in range(fixed, len(sizes)):
        if parts[-1] and used + 1 + sizes[column] > width:
            parts.append([])
            used = front
        parts[-1].append(column)
        used += 1 + sizes[column]
    return parts


def _line(cells: Sequence[str], sizes: Sequence[int]) -> str:
    return " ".join(
        f"{cut_front(cell, size):<{size}}" for cell, size in zip(cells, sizes, strict=True)
    )


def cut_front(text: str, width: int) -> str:
    """Return a string, or its end if it is longer than some number of characters."""
    return text if len(text) <= width else _CUT + text[len(text) - width + len(_CUT) :]


class Described:
    """Is shown in a notebook as a small table of its most important figures."""

    def _figures(self) -> dict[str, object]:
        """Return the most important figures, by name."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        return html_table(type(self).__name__.lstrip("_"), self._figures())


def html_table(title: str, rows: Mapping[str, object]) -> str:
    """Return a small table for a notebook: a title, and a line for each name and value."""
    lines = "".join(
        f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
        f"<td style='text-align:left'>{html.escape(str(value))}</td></tr>"
        for name, value in rows.items()
    )
    caption = f"<caption><b>{html.escape(title)}</b></caption>"
    return f"<table>{caption}<tbody>{lines}</tbody></table>"
