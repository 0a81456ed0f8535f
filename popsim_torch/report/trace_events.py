"""Events of Chrome's trace format, which Perfetto opens: how they are made and sorted.

Times are microseconds from the beginning of a process; each process has a clock of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["Event", "Events", "whole_trace"]

Event = dict[str, Any]


class Events:
    """The events of a trace, in any order."""

    def __init__(self) -> None:
        self._names: list[Event] = []
        self._events: list[Event] = []
        self._threads: set[tuple[int, int]] = set()
        self._flows = 0

    def process(self, pid: int, name: str) -> None:
        """Give a process its name; processes are shown in the order of their numbers."""
        self._names.append(_metadata("process_name", pid, 0, {"name": name}))
        self._names.append(_metadata("process_sort_index", pid, 0, {"sort_index": pid}))

    def thread(self, pid: int, tid: int, name: str) -> None:
        """Give a row of a process its name, once."""
        if (pid, tid) not in self._threads:
            self._threads.add((pid, tid))
            self._names.append(_metadata("thread_name", pid, tid, {"name": name}))
            self._names.append(_metadata("thread_sort_index", pid, tid, {"sort_index": tid}))

    def work(
        self,
        pid: int,
        tid: int,
        name: str,
        begin: float,
        duration: float,
        args: dict[str, Any] | None = None,
    ) -> Event:
        """Add a piece of work; those of a row follow one another or lie inside of one another."""
        event = {
            "ph": "X",
            "name": name,
            "pid": pid,
            "tid": tid,
            "ts": round(begin, 4),
            "dur": round(duration, 4),
        }
        if args:
            event["args"] = args
        self._events.append(event)
        return event

    def flow(self, source: Event, target: Event) -> None:
        """Add an arrow from one piece of work to the beginning of another."""
        self._flows += 1
        common = {"name": "copy", "cat": "copy", "id": self._flows}
        for phase, one in (("s", source), ("f", target)):
            place = {"pid": one["pid"], "tid": one["tid"], "ts": one["ts"]}
            self._events.append({"ph": phase, **common, **place})
        self._events[-1]["bp"] = "e"

    def counter(self, pid: int, name: str, time: float, value: float) -> None:
        """Add a value of a counter of a process."""
        self._events.append(
            {
                "ph": "C",
                "name": name,
                "pid": pid,
                "tid": 0,
                "ts": round(time, 4),
                "args": {"bytes": value},
            }
        )

    def sorted(self) -> list[Event]:
        """Return all events: the names, then the others by time; outer work before inner work."""
        ordered = sorted(self._events, key=lambda one: (one["ts"], -one.get("dur", -1.0)))
        return [*self._names, *ordered]


def _metadata(name: str, pid: int, tid: int, args: dict[str, Any]) -> Event:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": args}


def whole_trace(events: Iterable[Event], notes: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a trace file.

    Args:
        events: The events.
        notes: What the trace says about itself.
    """
    return {"traceEvents": list(events), "displayTimeUnit": "ns", "otherData": notes}
