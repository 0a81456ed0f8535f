"""The table of a run on a terminal, drawn by rich in the place of the one before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from popsim_torch.observe.sinks.fills import QueueRow
from popsim_torch.observe.sinks.live import Row
from popsim_torch.observe.sinks.queue_table import queue_table
from popsim_torch.observe.sinks.texts import cut, plural, short_number, sparkline

__all__ = ["Screen"]

_AROUND = 3
"""Lines of the table that are no rows: head, foot, and the cursor's."""
_WITH_QUEUES = 6
"""With fewer lines for rows than these, queues are not shown."""
_NUMBERS = (("mean", "mean"), ("std", "std"), ("norm", "norm"), ("max", "maximum"))
_WIDE, _NARROW = 110, 76
"""Terminals that are not wide show norm and maximum, narrow ones the norm alone (characters)."""
_STEP, _NUMBER, _GAP = 7, 9, 2
_FEW_BARS, _TITLED_BARS = 8, 14


class Screen:
    """Draws rows on a terminal.

    Args:
        stream: The terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream)
        self._live: Live | None = None

    @property
    def usable(self) -> bool:
        """Whether the terminal can draw in the same place again."""
        return self._console.is_terminal and not self._console.is_dumb_terminal

    def show(
        self, rows: Sequence[Row], queues: Sequence[QueueRow], statistic: str, foot: str
    ) -> None:
        """Draw the tables in the place of those before.

        Args:
            rows: The rows; if there are more than lines, those with alarms come first.
            queues: The rows of the table of queues.
            statistic: The statistic of the bars.
            foot: The text below the tables.
        """
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        room = max(1, self._console.height - _AROUND)
        parts = []
        if queues and room >= _WITH_QUEUES:
            most = room // 3
            width, ascii_only = self._console.width, self._console.options.ascii_only
            parts.append(queue_table(queues[:most], width, ascii_only))
            room -= 1 + len(queues[:most])
            if len(queues) > most:
                foot += f"; {plural(len(queues) - most, 'queue')} not shown"
        shown = list(rows)
        if len(shown) > room:
            shown = sorted(shown, key=lambda row: not row.alarms)[:room]
            foot += f"; {len(rows) - room} tensors are not shown"
        table = self._table(shown, statistic)
        self._live.update(Group(table, *parts, Text(foot, style="dim")), refresh=True)

    def close(self) -> None:
        """Leave the last table on the terminal."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _table(self, rows: Sequence[Row], statistic: str) -> Table:
        numbers = _shown_numbers(self._console.width)
        room = _widths(self._console.width, len(numbers), rows)
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("tensor", no_wrap=True, width=room.name)
        table.add_column("step", justify="right", no_wrap=True, width=_STEP)
        for title, _ in numbers:
            table.add_column(title, justify="right", no_wrap=True, width=_NUMBER)
        title = f"{statistic} over time"
        table.add_column(
            title if len(title) <= room.bars else statistic, no_wrap=True, width=room.bars
        )
        table.add_column("alarms", no_wrap=True, width=room.alarms)
        ascii_only = self._console.options.ascii_only
        for row in rows:
            table.add_row(
                Text(cut(row.name, room.name), style="bold red" if row.alarms else ""),
                str(row.step),
                *(short_number(getattr(row.statistics, name)) for _, name in numbers),
                Text(sparkline(list(row.values)[-room.bars :], ascii_only), style="cyan"),
                Text(row.wrong, style="red", overflow="ellipsis"),
            )
        return table


class _Widths(NamedTuple):
    """The widths of the columns that share what the numbers leave (characters)."""

    name: int
    bars: int
    alarms: int


def _shown_numbers(width: int) -> Sequence[tuple[str, str]]:
    """Return the titles and statistics that a terminal of some width has room for."""
    if width >= _WIDE:
        return _NUMBERS
    return _NUMBERS[2:] if width >= _NARROW else _NUMBERS[2:3]


def _widths(width: int, numbers: int, rows: Sequence[Row]) -> _Widths:
    """Return how wide columns are such that no line is wider than the terminal."""
    rest = max(30, width - _STEP - _GAP - numbers * (_NUMBER + _GAP) - 2 * _GAP)
    longest = max((len(row.wrong) for row in rows), default=0)
    alarms = max(len("alarms"), min(longest, max(15, rest // 4)))
    values = max((len(row.values) for row in rows), default=0)
    bars = min(max(values, _TITLED_BARS), rest // 3) if width >= _WIDE else _FEW_BARS
    name = max((len(row.name) for row in rows), default=0)
    return _Widths(max(len("tensor"), min(name, rest - bars - alarms)), bars, alarms)
