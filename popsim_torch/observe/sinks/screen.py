"""The table of a run on a terminal, drawn by rich in the place of the one before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from popsim_torch.observe.sinks.live import Row, short_number, sparkline

__all__ = ["Screen"]

_AROUND = 5
"""Lines of the table that are no rows: head, rules, foot, and the cursor's."""


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

    def show(self, rows: Sequence[Row], statistic: str, foot: str) -> None:
        """Draw the table in the place of the one before.

        Args:
            rows: The rows; if there are more than lines, those with alarms come first.
            statistic: The statistic of the bars.
            foot: The text below the table.
        """
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        room = max(1, self._console.height - _AROUND)
        shown = list(rows)
        if len(shown) > room:
            shown = sorted(shown, key=lambda row: not row.alarms)[:room]
            foot += f"; {len(rows) - room} tensors are not shown"
        table = self._table(shown, statistic)
        self._live.update(Group(table, Text(foot, style="dim")), refresh=True)

    def close(self) -> None:
        """Leave the last table on the terminal."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _table(self, rows: Sequence[Row], statistic: str) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("tensor", overflow="ellipsis", no_wrap=True, min_width=12)
        for name in ("step", "mean", "std", "norm", "max"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column(f"{statistic} over time", no_wrap=True, overflow="crop")
        # Without alarms the column has no width, and the table does not jump much when one comes.
        table.add_column("alarms", overflow="fold")
        ascii_only = self._console.options.ascii_only
        for row in rows:
            found = row.statistics
            numbers = (found.mean, found.std, found.norm, found.maximum)
            table.add_row(
                Text(row.name, style="bold red" if row.alarms else ""),
                str(row.step),
                *map(short_number, numbers),
                Text(sparkline(list(row.values), ascii_only), style="cyan"),
                Text(row.wrong, style="red"),
            )
        return table
