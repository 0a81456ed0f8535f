"""The measured part of a trace: what this computer did; never on the clock of the simulation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from popsim_torch.host_trace import HostEvent
from popsim_torch.report.trace_events import Events

if TYPE_CHECKING:
    from popsim_torch.report.report import RecordedRun

__all__ = ["add_measured"]

HOST = 1000
"""The number of the process of this computer."""
_CALLS, _LANES, _THREADS = 1, 10, 1000


def add_measured(
    events: Events, runs: Sequence[RecordedRun], marked: Iterable[HostEvent] = ()
) -> None:
    """Add the recorded calls, the lanes of their threads, and what channels marked.

    Args:
        events: The trace.
        runs: The recorded calls.
        marked: The work that ``profiling.Channel`` marked, on the same clock.
    """
    listed = list(marked)
    begins = [run.begin for run in runs] + [one.begin for one in listed]
    if not begins:
        return
    start = min(begins)
    events.process(HOST, "host (measured)")
    for run in runs:
        events.thread(HOST, _CALLS, "calls")
        events.work(
            HOST,
            _CALLS,
            f"call {run.number}",
            1e6 * (run.begin - start),
            1e6 * run.measured_seconds,
            {"measured": True},
        )
        for lane in run.lanes:
            tid = _LANES + lane["thread"]
            events.thread(HOST, tid, f"stages, thread {lane['thread']}")
            step = "" if lane["micro_batch"] is None else f" {lane['micro_batch']}"
            args = {
                name: lane[name]
                for name in ("stage", "device_iteration", "replica")
                if lane[name] is not None
            }
            begin = 1e6 * (run.begin - start + lane["begin"])
            length = 1e6 * (lane["end"] - lane["begin"])
            events.work(HOST, tid, f"{lane['kind']}{step}", begin, length, args)
    numbers = {
        thread: place for place, thread in enumerate(dict.fromkeys(e.thread for e in listed))
    }
    for one in listed:
        tid = _THREADS + numbers[one.thread]
        events.thread(HOST, tid, f"channels, {one.thread}")
        length = 1e6 * (one.end - one.begin)
        events.work(
            HOST, tid, one.label, 1e6 * (one.begin - start), length, {"channel": one.channel}
        )
