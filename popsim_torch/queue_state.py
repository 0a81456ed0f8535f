"""How full the queues between a program and the host are."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Protocol

__all__ = ["HasQueueState", "QueueState", "loaders", "register_loader"]


@dataclass(frozen=True)
class QueueState:
    """How full a queue is, and who waited for it.

    Attributes:
        name: ``InfeedQueue``; ``OutfeedQueue`` and the line that enqueues; ``DataLoader`` or
            ``AsynchronousDataAccessor``; ``data of fit`` and ``results of fit`` for the queues of
            ``fit``. A number follows if several have the same name.
        ready: The number of elements that can be taken. Of a loader, when the loop asked last.
        depth: The number of elements that the queue has room for; None if there is no limit. In an
            infeed queue, the elements that the program works on take some of the room.
        waits: How often the program, or the loop that calls it, waited for the queue.
        seconds_waited: How long it waited.
        seconds_full: How long what fills an infeed queue or a loader waited for room; None for an
            outfeed queue, which the program fills.
    """

    name: str
    ready: int
    depth: int | None
    waits: int
    seconds_waited: float
    seconds_full: float | None


class HasQueueState(Protocol):
    """A queue that says how full it is."""

    def _queue_state(self) -> QueueState | None:
        """Return its state, in any thread; None if there is nothing to show."""


_lock = threading.Lock()
_loaders: weakref.WeakSet[HasQueueState] = weakref.WeakSet()


def register_loader(loader: HasQueueState) -> None:
    """Note that a loader has begun; no program knows that its inputs come from it."""
    with _lock:
        _loaders.add(loader)


def loaders() -> list[HasQueueState]:
    """Return the loaders of this process that have begun, as far as they are still there."""
    with _lock:
        return list(_loaders)
