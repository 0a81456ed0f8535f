"""Threads that read records while models run: one for each executor that has sinks or conditions.

They end with their executors and with the process, and stay in the process that started them.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from typing import Protocol

from popsim_torch import logs

__all__ = ["RecordReader", "start_reading"]

_SECONDS = 0.05
"""The time between two looks."""


class RecordReader(Protocol):
    """An object that reads records and passes them on."""

    @property
    def lock(self) -> threading.RLock:
        """Held while records are read."""

    def look(self) -> None:
        """Take what has come, and pass it on; the lock is held."""

    def close_sinks(self) -> None:
        """Pass on what is left, and close all sinks."""

    def leave_to_parent(self) -> None:
        """Forget sinks and thread, which belong to the parent of this process."""


def start_reading(reader: RecordReader, stop: threading.Event) -> threading.Thread:
    """Start a thread that looks again and again.

    Args:
        reader: The object; the thread does not keep it alive.
        stop: Ends the thread when it is set.
    """
    thread = threading.Thread(
        target=_read, args=(weakref.ref(reader), stop), name="popsim_torch records", daemon=True
    )
    thread.start()
    if not _open:
        atexit.unregister(_close_all)
        atexit.register(_close_all)
    _open.add(reader)
    return thread


def _read(reader: weakref.ref[RecordReader], stop: threading.Event) -> None:
    while not stop.wait(_SECONDS):
        found = reader()
        if found is None:
            return
        try:
            with found.lock:
                if not stop.is_set():
                    found.look()
        except Exception:  # the thread must not end without a word
            logs.python.exception("The reader of statistics failed; no more records come.")
            return
        del found


_open: weakref.WeakSet[RecordReader] = weakref.WeakSet()
_held: list[RecordReader] = []  # while the process forks


def _close_all() -> None:
    for reader in list(_open):
        reader.close_sinks()


def _hold() -> None:
    """Let no reader be in the middle of something when the process forks."""
    _held.extend(_open)
    for reader in _held:
        reader.lock.acquire()


def _let_go() -> None:
    for reader in _held:
        reader.lock.release()
    _held.clear()


def _leave_to_parent() -> None:
    for reader in _held:
        reader.leave_to_parent()
    _let_go()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_leave_to_parent)
