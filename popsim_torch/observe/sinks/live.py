"""Shows the statistics of a run on the terminal while it runs."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

from popsim_torch.errors import UsageValueError
from popsim_torch.ir.selecting import names_like
from popsim_torch.observe.record import Record
from popsim_torch.observe.sinks.alarms import Alarm, AlarmFinder
from popsim_torch.observe.sinks.fills import Queues
from popsim_torch.observe.sinks.series import COLUMNS, label
from popsim_torch.observe.sinks.texts import plural, printable, short_number
from popsim_torch.queue_state import QueueState
from popsim_torch.statistics import Statistics

if TYPE_CHECKING:
    from popsim_torch.observe.sinks.screen import Screen

__all__ = ["LiveTerminal", "Row"]

_SCREEN_SECONDS = 0.25
_LINES_SECONDS = 1.0
_NAMES_IN_A_LINE = 4
_ALARM_LINES = 8
_KINDS = {"nan": "NaN", "inf": "inf", "zeros": "all 0", "norm": "norm explodes"}


@dataclass
class Row:
    """What the table shows of a tensor.

    Attributes:
        name: The label of the tensor.
        step: The step of the newest record.
        statistics: Its statistics.
        values: The chosen statistic over the last steps.
        alarms: What is wrong with the tensor.
    """

    name: str
    step: int
    statistics: Statistics
    values: deque[float]
    alarms: list[Alarm] = field(default_factory=list)

    @property
    def wrong(self) -> str:
        """The alarms as text: kind, first step, and how often."""
        return ", ".join(
            f"{_KINDS[one.kind]} at {one.first_step}"
            + (f" ({one.times}x)" if one.times > 1 else "")
            for one in self.alarms
        )


class LiveTerminal:
    """A sink of records that shows a table on the terminal, and draws it anew while the model runs.

    A tensor has a row: the newest step, mean, standard deviation, norm, maximum, a chosen statistic
    over the last steps as a row of small bars, and what is wrong with it: NaN, infinities, nothing
    but zeros, a norm of more than 100 times its median. The table needs the package ``rich``
    (``pip install rich``, or the extra ``live`` of this package). Without it, and if the output is
    no terminal, there is a line at most once per second, and one for each new alarm, without
    control characters.

    Below are the queues of the running program: how many elements are ready, over time, too, and
    how long the program and the producer of the elements waited. These are its infeed and outfeed
    queues, and the asynchronous loaders of the process.

    Args:
        select: Names or patterns of the tensors to show, such as ``"Gradient___*"``; None for all.
            As in ``Options.observe``, what fits no name is tried with ``model.`` added or removed.
        statistic: The statistic of the bars: ``"norm"``, ``"mean"``, ``"std"``, ``"minimum"``,
            ``"maximum"`` or ``"absolute_mean"``.
        history: The number of bars.
        stream: Where the output goes; None for ``sys.stdout``.

    Raises:
        UsageValueError: There is no such statistic, or ``history`` is not positive.
    """

    def __init__(
        self,
        select: str | Sequence[str] | None = None,
        *,
        statistic: str = "norm",
        history: int = 32,
        stream: TextIO | None = None,
    ) -> None:
        if statistic not in COLUMNS:
            raise UsageValueError(
                f"LiveTerminal: no statistic {statistic!r}; there are {', '.join(COLUMNS)}."
            )
        if history < 1:
            raise UsageValueError(f"LiveTerminal: history is 1 or more, got {history!r}.")
        self._select = [select] if isinstance(select, str) else select
        self._names: dict[str, None] = {}
        self._selected: set[str] = set()
        self._statistic = statistic
        self._history = history
        self._stream = sys.stdout if stream is None else stream
        self._rows: dict[str, Row] = {}
        self._queues = Queues(history)
        self._alarms = AlarmFinder()
        self._dropped = 0
        self._step = -1
        self._shown_at = -math.inf
        self._pending = False
        self._screen = _screen(self._stream)

    def write_records(self, records: Sequence[Record]) -> None:
        """Take records, and show them if the last time is long enough ago."""
        self._learn_names(records)
        new: list[Alarm] = []
        for record in records:
            if self._select is None or record.name in self._selected:
                new += self._take(record)
        if self._screen is None:
            self._print_alarms(new)
        self._show_if_due()

    def records_dropped(self, count: int) -> None:
        """Take the number of records that were dropped since the beginning."""
        self._pending |= count != self._dropped
        self._dropped = count

    def show_queues(self, states: Sequence[QueueState]) -> None:
        """Take how full the queues of the running program are.

        Args:
            states: A state for each queue.
        """
        # Lines come with records alone.
        if self._queues.take(states) and self._screen is not None and self._rows:
            self._pending = True
            self._show_if_due()

    def close(self) -> None:
        """Show what came last, and leave it on the terminal."""
        if self._pending:
            self._show()
        if self._screen is not None:
            self._screen.close()

    def _learn_names(self, records: Sequence[Record]) -> None:
        """Choose among all names so far, if there are new ones."""
        new = {one.name: None for one in records if one.name not in self._names}
        if new and self._select is not None:
            self._names |= new
            self._selected = {name for one in self._select for name in names_like(one, self._names)}

    def _take(self, record: Record) -> list[Alarm]:
        name = printable(label(record))
        row = self._rows.get(name)
        if row is None:
            row = Row(name, record.step, record.statistics, deque(maxlen=self._history))
            self._rows[name] = row
        row.step, row.statistics = record.step, record.statistics
        number = getattr(record.statistics, self._statistic)
        row.values.append(math.nan if number is None else number)
        new = self._alarms.look(record)
        row.alarms += new
        self._step = max(self._step, record.step)
        self._pending = True
        return new

    def _show_if_due(self) -> None:
        """Show what is new if the last time is long enough ago."""
        seconds = _LINES_SECONDS if self._screen is None else _SCREEN_SECONDS
        if self._pending and time.monotonic() - self._shown_at >= seconds:
            self._show()

    def _show(self) -> None:
        self._queues.note_fills()
        if self._screen is None:
            self._print(self._line())
        else:
            rows, queues = list(self._rows.values()), self._queues.rows
            self._screen.show(rows, queues, self._statistic, self._foot())
        self._shown_at = time.monotonic()
        self._pending = False

    def _foot(self) -> str:
        """Return how much there is: steps, tensors, alarms, dropped records."""
        parts = [f"step {self._step}", plural(len(self._rows), "tensor")]
        if self._alarms.alarms:
            parts.append(plural(len(self._alarms.alarms), "alarm"))
        if self._dropped:
            parts.append(f"{plural(self._dropped, 'record')} dropped")
        return ", ".join(parts)

    def _line(self) -> str:
        """Return a line with the statistic of some tensors, those with alarms first, and queues."""
        rows = sorted(self._rows.values(), key=lambda row: not row.alarms)
        shown = [
            f"{row.name} {short_number(row.values[-1])}"
            for row in rows[:_NAMES_IN_A_LINE]
            if row.values
        ]
        rest = len(rows) - len(shown)
        more = f", and {rest} more" if rest else ""
        queues = ", ".join(row.text for row in self._queues.rows)
        end = f"; queues: {queues}" if queues else ""
        return f"{self._foot()}; {self._statistic}: {', '.join(shown)}{more}{end}"

    def _print_alarms(self, alarms: Sequence[Alarm]) -> None:
        for alarm in alarms[:_ALARM_LINES]:
            self._print(f"alarm at step {alarm.first_step}: {printable(alarm.name)}: {alarm.text}")
        if len(alarms) > _ALARM_LINES:
            self._print(f"and {len(alarms) - _ALARM_LINES} more alarms")

    def _print(self, line: str) -> None:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._stream.write(line.encode(encoding, "replace").decode(encoding) + "\n")
        self._stream.flush()


def _screen(stream: TextIO) -> Screen | None:
    """Return what draws on a terminal, or None without a terminal or without rich."""
    if not stream.isatty():
        return None
    try:
        from popsim_torch.observe.sinks.screen import Screen
    except ImportError:
        return None
    screen = Screen(stream)
    return screen if screen.usable else None
