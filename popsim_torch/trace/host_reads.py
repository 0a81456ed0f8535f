"""Warns when forward reads a value from the host that would differ each time, or changes one.

Forward, the bodies of loops and the functions around these run once, while they are recorded. So
the time, a random number of Python or NumPy, or a line of a file is the same in every run.
"""

from __future__ import annotations

import builtins
import functools
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

from popsim_torch import logs
from popsim_torch.ops import op_listener
from popsim_torch.shared_scope import SharedScope
from popsim_torch.trace.graph.origin import user_line

__all__ = ["LIBRARIES", "noticed_host_reads", "warn_of_host_change", "warn_of_host_read"]

LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "popsim_torch", "numpy"} - {"__main__"})
"""Packages that are not the user's code: their reads get no warning."""

_CLOCKS = tuple(
    f"{name}{unit}"
    for name in ("time", "perf_counter", "monotonic", "process_time", "thread_time")
    for unit in ("", "_ns")
)
_SETTINGS = frozenset({"seed", "getstate", "setstate", "get_state", "set_state", "default_rng"})

_said: set[str] = set()
"""Lines with a warning in this trace; one trace runs at a time."""


def _drawing(module: Any) -> Iterator[str]:
    """Yield the names of a module's functions that draw random numbers."""
    for name in module.__all__:
        member = getattr(module, name)
        if name not in _SETTINGS and callable(member) and not isinstance(member, type):
            yield name


_READS: tuple[tuple[Any, str, Iterable[str]], ...] = (
    (time, "time", _CLOCKS),
    (random, "random", tuple(_drawing(random))),
    (np.random, "numpy.random", tuple(_drawing(np.random))),
    (builtins, "", ("open",)),
)


def _is_traced() -> bool:
    # Code that runs on the host has no listener.
    return op_listener.get() is not None


_runs_once: ContextVar[Callable[[], bool]] = ContextVar(
    "popsim_torch_runs_once", default=lambda: False
)
"""Returns whether the present code, in this thread, runs only once."""


@contextmanager
def noticed_host_reads(is_recorded: Callable[[], bool] = _is_traced) -> Iterator[None]:
    """Warn, once for each line, of calls in this scope by code that runs only once.

    Args:
        is_recorded: Returns whether such code is the caller.
    """
    _said.clear()
    token = _runs_once.set(is_recorded)
    try:
        with _reads_replaced:
            yield
    finally:
        _runs_once.reset(token)


@contextmanager
def _replaced() -> Iterator[None]:
    # (not with mock: each compilation needs this, and mock would take a millisecond)
    before = [
        (module, path, name, getattr(module, name))
        for module, path, names in _READS
        for name in names
    ]
    try:
        for module, path, name, function in before:
            setattr(module, name, _noticed(function, path, name))
        yield
    finally:
        for module, _, name, function in before:
            setattr(module, name, function)


_reads_replaced = SharedScope(_replaced)


def warn_of_host_read(name: str) -> None:
    """Warn that the user's code calls a function that reads from the host."""
    line = user_line(" at ")
    if line in _said:
        return
    _said.add(line)
    logs.python.warning(
        "%s()%s is called once, while the program is recorded: its result is the same in all runs "
        "of the program. Pass changing values as an input, or as an element of an InfeedQueue%s.",
        name,
        line,
        "; on the device, torch.rand draws new numbers in each run" if "rand" in name else "",
    )


def warn_of_host_change(name: str, *, on_device: bool = False) -> None:
    """Warn that the user's code changes a host tensor in place.

    Args:
        name: The function that changes it.
        on_device: Whether the device changes it, so that a copy is changed.
    """
    line = user_line(" at ")
    if line in _said:
        return
    _said.add(line)
    what = (
        "changes a copy of a tensor of the host: each run, and each iteration of a loop, begins "
        "with a new copy, and the tensor itself does not change"
        if on_device
        else "changes a tensor of the host once, while the program is recorded, but in no run"
    )
    logs.python.warning(
        "%s()%s %s. Make the tensor a buffer (module.register_buffer), which the device changes, "
        "or take the tensor as an argument, and return a new one.",
        name,
        line,
        what,
    )


@functools.lru_cache(maxsize=256)
def _noticed(function: Callable[..., Any], path: str, name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _runs_once.get()() and _called_by_user():
            warn_of_host_read(f"{path}.{name}" if path else name)
        return function(*args, **kwargs)

    return call


def _called_by_user() -> bool:
    caller = sys._getframe(2).f_globals.get("__name__") or ""
    return caller.partition(".")[0] not in LIBRARIES
