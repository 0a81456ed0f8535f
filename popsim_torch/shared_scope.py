"""Changes of the whole process, which several threads may ask for at the same time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

__all__ = ["SharedScope"]


class SharedScope:
    """A scope in which something of the process is otherwise, for as long as anybody is in it.

    Scopes that each put back what they found end in another order than they began where threads
    overlap, and one thread then puts back what was another's. This one is begun by the first thread
    that comes, and ended by the last one that leaves.

    Args:
        make: Returns the scope. Whoever needs to be told apart from other threads is told so by
            what it puts in place.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[object]]) -> None:
        self._make = make
        self._count = 0
        self._scope: AbstractContextManager[object] | None = None
        self._renew_lock()
        # A thread of the parent is in no scope of the child, but may hold the lock.
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
