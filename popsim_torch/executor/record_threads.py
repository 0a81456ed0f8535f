"""Threads that read records while models run, and pass them on to sinks.

They end with their objects and with the process, and stay in the process that started them.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Protocol

from popsim_torch import logs

__all__ = ["RecordReader", "WorkerThread", "keep_track"]

_MOMENT = 0.5  # (seconds)
_PATIENCE = 0.5
"""How long a fork waits for a reader that is in the middle of something (seconds)."""


class Worker(Protocol):
    """An object with work to do again and again."""

    def work(self) -> None:
        """Do what there is to do."""


class WorkerThread:
    """A thread that lets an object work at regular times, and does not keep the object alive.

    Args:
        worker: The object.
        name: The name of the thread.
        seconds: The time between two looks.
    """

    def __init__(self, worker: Worker, name: str, seconds: float) -> None:
        self._worker = weakref.ref(worker)
        self._seconds = seconds
        self._wake, self._stop = threading.Event(), threading.Event()
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def works(self) -> bool:
        """Whether it looks for work, in this process."""
        alive = self._thread.is_alive() and not self._stop.is_set()
        return alive and self._process == os.getpid()

    def wake(self) -> None:
        """Let the object work now."""
        self._wake.set()

    def stop(self) -> None:
        """End the thread after the work in progress; wait for it for a moment."""
        self._stop.set()
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_MOMENT)

    def _run(self) -> None:
        while True:
            self._wake.wait(self._seconds)
            self._wake.clear()
            worker = self._worker()
            if self._stop.is_set() or worker is None:
                return
            try:
                worker.work()
            except BaseException:  # the thread must not end without a word
                logs.python.exception("The reader of statistics failed; no more records come.")
                self._stop.set()
                return
            del worker


class RecordReader(Protocol):
    """An object that reads records and passes them on."""

    @property
    def locks(self) -> Sequence[threading.RLock]:
        """Held while it is in the middle of something."""

    def close_sinks(self) -> None:
        """Pass on what is left, and close all sinks."""

    def leave_to_parent(self) -> None:
        """Forget sinks and threads, which belong to the parent of this process."""


_open: weakref.WeakSet[RecordReader] = weakref.WeakSet()
_held: list[threading.RLock] = []  # while the process forks


def keep_track(reader: RecordReader) -> None:
    """Close the sinks of a reader when the process ends; leave them to the parent in a child."""
    if not _open:
        atexit.unregister(_close_all)
        atexit.register(_close_all)
    _open.add(reader)


def _close_all() -> None:
    for reader in list(_open):
        reader.close_sinks()


def _hold() -> None:
    """Let no reader be in the middle of something when the process forks."""
    for reader in list(_open):
        # Two readers may wait for each other, if a sink of one reads records of the other.
        _held.extend(lock for lock in reader.locks if lock.acquire(timeout=_PATIENCE))


def _let_go() -> None:
    for lock in _held:
        lock.release()
    _held.clear()


def _leave_to_parent() -> None:
    _let_go()
    for reader in list(_open):
        reader.leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_leave_to_parent)
