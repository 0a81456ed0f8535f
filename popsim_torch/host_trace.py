"""The trace of this computer that ``profiling.Channel`` marks, when PopVision's library is absent.

With ``PVTI_OPTIONS='{"enable": "true", "directory": "reports"}'`` the marks of a program are
written to ``<directory>/popsim_host__<date>__<time>__<pid>.trace.json`` when the program ends, as
events of Chrome's trace format, which Perfetto opens. Times are measured on this computer.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["HostEvent", "HostTrace", "current", "stamp"]

_MOST_EVENTS = 500_000


class HostEvent(NamedTuple):
    """A piece of work that a channel marked.

    Attributes:
        channel: The name of the channel.
        label: ``<channel>.<name of the work>``.
        thread: The name of the thread.
        begin: When it began (seconds, ``time.perf_counter``).
        end: When it ended.
    """

    channel: str
    label: str
    thread: str
    begin: float
    end: float


class HostTrace:
    """Collects what channels mark, and writes it when the program ends.

    Args:
        directory: Where to write.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.left_out = 0
        self.events: list[HostEvent] = []
        self._pid = os.getpid()
        self._began = datetime.now()
        atexit.register(self.write)

    def createTraceChannel(self, name: str) -> str:
        """Return a channel, with the method name of PopVision's library."""
        return name

    @contextmanager
    def Tracepoint(self, channel: str, label: str) -> Iterator[None]:
        """Mark the work inside, with the method name of PopVision's library."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            if len(self.events) < _MOST_EVENTS:
                thread = threading.current_thread().name
                event = HostEvent(channel, label, thread, begin, time.perf_counter())
                self.events.append(event)
            else:
                self.left_out += 1

    @property
    def path(self) -> Path:
        """The file to write."""
        return self.directory / f"popsim_host__{stamp(self._began)}__{self._pid}.trace.json"

    def write(self) -> None:
        """Write the trace, unless there is nothing to write or this is a forked process."""
        if not self.events or os.getpid() != self._pid:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self._content(), separators=(",", ":")))
        except OSError as error:
            # (the log may be closed at exit; a warning of Python is printed until the end)
            import warnings

            warnings.warn(f"PVTI_OPTIONS: the trace cannot be written: {error}", stacklevel=1)

    def _content(self) -> dict[str, Any]:
        events = sorted(self.events, key=lambda one: (one.begin, -one.end))
        start, pid = events[0].begin, self._pid
        numbers = dict.fromkeys(one.thread for one in events)
        tids = {thread: place + 1 for place, thread in enumerate(numbers)}
        names: list[dict[str, Any]] = [_named("process_name", pid, 0, "host (measured)")]
        names += [_named("thread_name", pid, tid, thread) for thread, tid in tids.items()]
        work = [
            {
                "ph": "X",
                "name": one.label,
                "cat": one.channel,
                "pid": pid,
                "tid": tids[one.thread],
                "ts": round(1e6 * (one.begin - start), 3),
                "dur": round(1e6 * (one.end - one.begin), 3),
            }
            for one in events
        ]
        notes: dict[str, Any] = {"clock": "Microseconds, measured on this computer."}
        if self.left_out:
            notes["left_out"] = f"{self.left_out} marks after the first {_MOST_EVENTS}"
        return {"traceEvents": names + work, "displayTimeUnit": "ns", "otherData": notes}


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}


def stamp(moment: datetime) -> str:
    """Return a moment as in the names of reports: ``2026-10-06__02-24-24.631``."""
    return f"{moment:%Y-%m-%d__%H-%M-%S}.{moment.microsecond // 1000:03}"


_trace: HostTrace | None = None


def current() -> HostTrace | None:
    """Return the trace that this program collects; None if it collects none."""
    return _trace


def wanted(settings: dict[str, Any]) -> HostTrace | None:
    """Return the trace of this program if the settings of ``PVTI_OPTIONS`` turn it on.

    Args:
        settings: ``enable`` turns it on; ``directory`` is where it is written.
    """
    global _trace
    if str(settings.get("enable", "")).lower() != "true":
        return None
    if _trace is None or _trace._pid != os.getpid():
        _trace = HostTrace(Path(str(settings.get("directory", "."))).absolute())
    return _trace
