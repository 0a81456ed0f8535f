"""The lock that compilations hold: only one thread compiles at a time.

torch.fx traces with state that belongs to the process, and modules have traced tensors instead of
their weights meanwhile. So uploads of weights, maybe by another executor of the same module, hold
the lock, too.
"""

from __future__ import annotations

import os
import sys
import threading

from popsim_torch.errors import Error

__all__ = ["compile_lock"]

_PATIENCE = 5.0
"""Seconds that a thread waits before it looks what the thread with the lock does."""


class _CompileLock:
    """A lock for ``with``; the thread that has it may take it again."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner: int | None = None

    def renew(self) -> None:
        """Forget that another thread has the lock: a child process has only the one that forks."""
        if self._owner != threading.get_ident():
            self._lock = threading.RLock()
            self._owner = None

    def __enter__(self) -> None:
        """Wait for the lock.

        Raises:
            Error: The thread that has it waits for another thread, which may be this one.
        """
        while not self._lock.acquire(timeout=_PATIENCE):
            frame = sys._current_frames().get(self._owner or 0)
            if frame is not None and frame.f_code.co_filename == threading.__file__:
                raise Error(
                    "Only one model is compiled at a time, and the thread that compiles one now "
                    "waits for another thread, maybe for this one: its forward starts or uses "
                    "threads. Call this model, or model.compile(...), before that forward runs."
                )
        self._owner = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        """Let another thread have the lock."""
        self._lock.release()


compile_lock = _CompileLock()
os.register_at_fork(after_in_child=compile_lock.renew)
