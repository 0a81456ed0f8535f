"""The table of queues on a terminal, below the one of tensors."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from popsim_torch.observe.sinks.fills import QueueRow
from popsim_torch.observe.sinks.texts import cut, sparkline

__all__ = ["queue_table"]

_NARROW = 76
"""Narrower terminals do not show how long producers waited (characters)."""
_READY, _WAITED, _GAP = 7, 18, 2
_FEW_BARS, _TITLED_BARS = 8, 15


def queue_table(rows: Sequence[QueueRow], width: int, ascii_only: bool) -> Table:
    """Return a table of queues that is not wider than the terminal.

    Args:
        rows: A row for each queue.
        width: The width of the terminal (characters).
        ascii_only: Whether the terminal has only ASCII characters.
    """
    waits = ["program waited"] if width < _NARROW else ["program waited", "producer waited"]
    rest = max(24, width - _READY - 2 * _GAP - len(waits) * (_WAITED + _GAP))
    values = max((len(row.fills) for row in rows), default=0)
    bars = min(max(values, _TITLED_BARS), rest // 3) if width >= _NARROW else _FEW_BARS
    name = min(max(len("queue"), *(len(row.name) for row in rows)), rest - bars)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("queue", no_wrap=True, width=name)
    table.add_column("ready", justify="right", no_wrap=True, width=_READY)
    title = "ready over time" if bars >= _TITLED_BARS else "in time"
    table.add_column(title, no_wrap=True, width=bars)
    for title in waits:
        table.add_column(title, justify="right", no_wrap=True, width=_WAITED)
    for row in rows:
        waited = [Text(row.program_waited), Text(row.producer_waited)][: len(waits)]
        shown = sparkline(list(row.fills)[-bars:], ascii_only, row.span)
        table.add_row(
            Text(cut(row.name, name)), Text(row.ready), Text(shown, style="cyan"), *waited
        )
    return table
