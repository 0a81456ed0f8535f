"""``trace.json``: a report as a trace that Perfetto and Chrome open."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from popsim_torch.host_trace import HostEvent
from popsim_torch.report.measured_trace import add_measured
from popsim_torch.report.simulated_trace import CUTS, Cut, SimulatedTrace, num_events
from popsim_torch.report.trace_events import Events, whole_trace

if TYPE_CHECKING:
    from popsim_torch.report.report import Report

__all__ = ["MOST_BYTES", "choose_cut", "make_trace", "trace_bytes"]

MOST_BYTES = 20_000_000
"""A trace that would be larger leaves something out, and says so."""
_EVENT_BYTES = 170
_CLOCKS = (
    "Times are microseconds. The IPUs and their host streams are simulated and share a clock of "
    "their own; 'host (measured)' is this computer, on another clock. Do not compare them."
)


def trace_bytes(report: Report, cut: Cut) -> int:
    """Return about how many bytes a trace will have, without making it."""
    measured = sum(1 + len(run.lanes) for run in report.runs)
    if report.estimate is None:
        return _EVENT_BYTES * measured
    return _EVENT_BYTES * (measured + num_events(report.estimate, len(report.runs), cut))


def choose_cut(report: Report, most_bytes: int = MOST_BYTES) -> Cut:
    """Return what a trace leaves out to have at most some number of bytes."""
    return next((cut for cut in CUTS if trace_bytes(report, cut) <= most_bytes), CUTS[-1])


def make_trace(report: Report, cut: Cut, marked: Iterable[HostEvent] = ()) -> dict[str, Any]:
    """Return the content of a trace.

    Args:
        report: The report.
        cut: What to leave out.
        marked: What channels marked on this computer.
    """
    events = Events()
    if report.estimate is not None:
        SimulatedTrace(events, report.estimate, report.ops, cut).add(len(report.runs))
    add_measured(events, report.runs, marked)
    notes: dict[str, Any] = {"program": report.name, "clocks": _CLOCKS}
    if report.estimate is None:
        notes["estimate"] = f"none: {report.why_no_estimate}"
    else:
        notes["grades"] = report.estimate["grades"]
        notes["shown"] = cut.text or "everything"
    if report.estimate is not None and not report.runs:
        notes["calls"] = "no call was recorded; one simulated call is shown"
    return whole_trace(events.sorted(), notes)
