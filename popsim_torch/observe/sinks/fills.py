"""What the live table shows of queues: how full they are, and who waited for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from popsim_torch.observe.sinks.texts import printable, short_number
from popsim_torch.queue_state import QueueState

__all__ = ["QueueRow", "Queues"]


@dataclass
class QueueRow:
    """What the table shows of a queue.

    Attributes:
        name: The name of the queue.
        state: Its newest state.
        fills: The number of ready elements each time the table was drawn.
    """

    name: str
    state: QueueState
    fills: deque[float]

    @property
    def ready(self) -> str:
        """How many elements are ready, such as ``2/3``."""
        depth = self.state.depth
        return str(self.state.ready) if depth is None else f"{self.state.ready}/{depth}"

    @property
    def span(self) -> tuple[float, float]:
        """The numbers of ready elements of the lowest and the highest bar."""
        most = max(self.fills, default=0.0) if self.state.depth is None else self.state.depth
        return 0.0, max(1.0, most)

    @property
    def program_waited(self) -> str:
        """How long and how often the program waited."""
        waits = self.state.waits
        return f"{_seconds(self.state.seconds_waited)} ({waits}x)" if waits else "-"

    @property
    def producer_waited(self) -> str:
        """How long what fills the queue waited for room."""
        return _seconds(self.state.seconds_full) if self.state.seconds_full else "-"

    @property
    def text(self) -> str:
        """All of it in some words."""
        waited = f" (program waited {self.program_waited})" if self.state.waits else ""
        return f"{self.name} {self.ready}{waited}"


class Queues:
    """The queues of a run.

    Args:
        history: The number of bars of a queue.
    """

    def __init__(self, history: int) -> None:
        self._history = history
        self.rows: list[QueueRow] = []

    def take(self, states: Sequence[QueueState]) -> bool:
        """Take the present states, and return whether they differ from those before."""
        if list(states) == [row.state for row in self.rows]:
            return False
        known = {row.state.name: row.fills for row in self.rows}
        self.rows = [
            QueueRow(
                printable(state.name),
                state,
                known.get(state.name, deque(maxlen=self._history)),
            )
            for state in states
        ]
        return True

    def note_fills(self) -> None:
        """Remember how full the queues are, for the bars."""
        for row in self.rows:
            row.fills.append(row.state.ready)


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 1000 else f"{short_number(seconds)} s"
