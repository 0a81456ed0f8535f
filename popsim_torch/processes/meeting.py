"""How processes find each other in a store: only those that are there now, all at once.

A store may outlive the processes. After a restart, it still has the values of the earlier ones, so
a value alone does not say that a process is there. Each process brings a token that nobody had
before, and process 0 writes down the tokens that it sees. A process answers with this list if its
own token is in it; when all have answered with the same list, process 0 opens the meeting.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from popsim_torch.private_torch.process_groups import Store

__all__ = ["Absent", "meet"]

_PAUSE = 0.005
"""How long to wait before looking again whether a process has come (seconds)."""


class Absent(Exception):
    """Some processes did not come.

    Args:
        ranks: Their numbers.
    """

    def __init__(self, ranks: set[int]) -> None:
        super().__init__(str(sorted(ranks)))
        self.ranks = ranks


def meet(store: Store, rank: int, size: int, seconds: float) -> str:
    """Wait for all processes; return a name for this meeting that all of them get.

    Args:
        store: Only this meeting uses it, and earlier ones of processes that have ended.
        rank: The number of this process.
        size: The number of processes.
        seconds: The longest time to wait.

    Raises:
        Absent: The time is up.
        RuntimeError: The store cannot be reached.
    """
    token = os.urandom(8).hex()
    store.set(f"token/{rank}", token)
    end = time.monotonic() + seconds
    steps = _host(store, size) if rank == 0 else _guest(store, rank, token)
    for name in steps:
        if name:
            return name
        if time.monotonic() > end:
            present = {one for one in range(size) if _read(store, f"token/{one}")}
            answers = {one for one in range(size) if rank or _has_answered(store, one)}
            raise Absent(set(range(size)) - (present & answers | {rank}))
        time.sleep(_PAUSE)
    raise AssertionError("a meeting ends when it is open")


def _host(store: Store, size: int) -> Iterator[str]:
    """Yield the name of the meeting once all have answered, and an empty string until then."""
    guests = range(1, size)
    while True:
        tokens = [_read(store, f"token/{one}") for one in range(size)]
        name = "-".join(tokens)
        store.set("list", name)
        if all(tokens) and all(_read(store, f"answer/{one}") == name for one in guests):
            store.set("open", name)
            yield name
        yield ""


def _guest(store: Store, rank: int, token: str) -> Iterator[str]:
    """Yield the name of the meeting once it is open, and an empty string until then."""
    while True:
        name = _read(store, "list")
        if token in name.split("-"):
            store.set(f"answer/{rank}", name)
            if _read(store, "open") == name:
                yield name
        yield ""


def _has_answered(store: Store, rank: int) -> bool:
    return rank == 0 or _read(store, f"answer/{rank}") == _read(store, "list")


def _read(store: Store, key: str) -> str:
    """Return a value, or an empty string if there is none."""
    return store.get(key).decode() if store.check([key]) else ""
