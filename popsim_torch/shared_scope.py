"""Scopes that change the whole process, and that several threads may enter at the same time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

__all__ = ["SharedScope"]


class SharedScope:
    """A scope that changes the process for as long as at least one thread is in it.

    If each thread saved and restored the earlier state by itself, scopes of several threads could
    end in another order than they began, and a thread could restore the change of another. So the
    first thread that enters begins the scope, and the last thread that leaves ends it.

    Args:
        make: Returns the scope as a context manager. If threads must be told apart, the change that
            this scope makes has to do so.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[object]]) -> None:
        self._make = make
        self._count = 0
        self._scope: AbstractContextManager[object] | None = None
        self._renew_lock()
        # Threads of the parent do not exist in a forked child, but one of them may hold the lock.
        os.register_at_fork(after_in_child=self._renew_lock)

    def _renew_lock(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            if self._count == 0:
                scope = self._make()
                scope.__enter__()
                self._scope = scope
            self._count += 1

    def __exit__(self, *_exception: object) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0:
                scope, self._scope = self._scope, None
                assert scope is not None
                scope.__exit__(None, None, None)
