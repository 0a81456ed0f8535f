"""The trace: rules of Chrome's trace events, times, arrows, and what is left out."""

import json
import math
from collections import Counter, defaultdict

import pytest

from popsim_torch.host_trace import HostEvent
from popsim_torch.report.report import Report
from popsim_torch.report.simulated_trace import CUTS
from popsim_torch.report.trace import MOST_BYTES, choose_cut, make_trace, trace_bytes
from tests.report.data import HERTZ, make_report

MARKED = [
    HostEvent("data", "data.load", "MainThread", 99.0, 99.5),
    HostEvent("data", "data.inner", "MainThread", 99.1, 99.2),
    HostEvent("data", "data.load", "worker", 99.3, 100.2),
]
SLACK = 2e-3  # us; times are rounded to ten thousandths


def check_events(trace):
    """Check the rules of the format; return the events but for the names."""
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace
    events = trace["traceEvents"]
    for one in events:
        assert {"ph", "pid", "tid", "ts", "name"} <= set(one)
        assert isinstance(one["pid"], int) and isinstance(one["tid"], int)
        assert one["ph"] in "XMCsf"
        assert math.isfinite(one["ts"]) and one["ts"] >= 0
        assert one["ph"] != "X" or one["dur"] >= 0
    names = [one for one in events if one["ph"] == "M"]
    assert events[: len(names)] == names
    rest = events[len(names) :]
    assert [one["ts"] for one in rest] == sorted(one["ts"] for one in rest)
    check_rows(rest, names)
    check_flows(rest)
    return rest


def check_rows(events, names):
    """Every row has a name; what is in a row is one after the other, or one inside of the other."""
    named = {(one["pid"], one["tid"]) for one in names if one["name"] == "thread_name"}
    processes = {one["pid"] for one in names if one["name"] == "process_name"}
    rows = defaultdict(list)
    for one in events:
        if one["ph"] == "X":
            rows[one["pid"], one["tid"]].append(one)
    assert set(rows) <= named and {pid for pid, _ in rows} <= processes
    for row in rows.values():
        open_until = []
        for one in row:
            while open_until and open_until[-1] <= one["ts"] + SLACK:
                open_until.pop()
            end = one["ts"] + one["dur"]
            assert not open_until or end <= open_until[-1] + SLACK, one
            open_until.append(end)


def check_flows(events):
    """Each arrow begins once and ends once, later, and both ends lie on a piece of work."""
    ends, work = defaultdict(list), defaultdict(list)
    for one in events:
        if one["ph"] in "sf":
            ends[one["id"]].append(one)
        elif one["ph"] == "X":
            work[one["pid"], one["tid"], one["ts"]].append(one)
    for pair in ends.values():
        assert [one["ph"] for one in pair] == ["s", "f"]
        assert pair[0]["ts"] <= pair[1]["ts"] and pair[1]["bp"] == "e"
        # (both ends are at the beginning of a piece of work)
        assert all((one["pid"], one["tid"], one["ts"]) in work for one in pair)


def trace_of(cut=CUTS[0], marked=(), **settings):
    report = Report(make_report(**settings))
    return report, make_trace(report, cut, marked)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"stages": 1},
        {"stages": 4, "layers": 8, "accumulation": 20},
        {"training": False, "iterations": 7, "stages": 3},
        {"accumulation": 1, "iterations": 1},
        {"runs": 0},
    ],
)
def test_the_rules_of_the_format(cut, settings):
    _, trace = trace_of(cut, MARKED, lanes=12, **settings)
    check_events(trace)


def test_calls_last_as_long_as_the_estimate_says():
    report, trace = trace_of(runs=2)
    events = check_events(trace)
    end = max(one["ts"] + one.get("dur", 0) for one in events if one["pid"] < 900)
    assert end == pytest.approx(2 * 1e6 * report.estimate["call"]["seconds"], rel=1e-6)


def test_what_is_left_out_keeps_its_time():
    for cut in CUTS[:3]:
        report, trace = trace_of(cut, runs=2, accumulation=50, iterations=30)
        events = check_events(trace)
        end = max(one["ts"] + one.get("dur", 0) for one in events if one["pid"] < 900)
        assert end == pytest.approx(2 * 1e6 * report.estimate["call"]["seconds"], rel=1e-6)
        left = [one["name"] for one in events if one["name"].startswith("left out")]
        assert bool(left) == (cut.periods is not None)
    assert "left out: 28 device iterations, as before" in left
    assert "left out: 46 periods, as before" in left


def test_every_action_is_there():
    report, trace = trace_of(runs=1, accumulation=6, iterations=2)
    events = check_events(trace)
    work = Counter(
        (one["pid"], one["name"])
        for one in events
        if one["ph"] == "X" and "stage" in one.get("args", {}) and not one["name"].startswith("to")
    )
    expected = {
        (ipu, f"{kind} {step}"): 2
        for ipu in (0, 1)
        for kind in ("forward", "backward")
        for step in range(6)
    }
    assert work == expected
    updates = [one for one in events if one["name"] == "weight update"]
    assert len(updates) == 4
    ops = [one for one in events if one["name"] == "UpdatedVar___net.block0.fc3.weight"]
    assert {one["pid"] for one in ops} == {1} and len(ops) == 2
    op = next(one for one in report.ops if one.name == ops[0]["name"])
    assert ops[0]["dur"] == pytest.approx(1e6 * op.cycles / HERTZ, abs=1e-3)
    assert ops[0]["args"] == {"cycles": op.cycles, "grade": "C", "module": "net.block0.fc3"}


def test_copies_between_ipus_are_arrows():
    _, trace = trace_of(runs=1, accumulation=6, iterations=1)
    events = check_events(trace)
    flows = [one for one in events if one["ph"] == "s"]
    # Each micro-batch crosses forward and backward.
    assert len(flows) == 12
    copies = [one for one in events if one["name"].startswith("to IPU")]
    assert {one["args"]["bytes"] for one in copies} == {2048}


def test_counters_show_the_memory_of_the_fullest_tile():
    report, trace = trace_of(runs=1)
    events = check_events(trace)
    for one in report.memory:
        values = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["pid"] == one.ipu]
        assert max(values) == one.peak and len(values) == len(one.liveness)


def test_measured_time_is_in_a_process_of_its_own():
    _, trace = trace_of(lanes=4, marked=MARKED)
    events = check_events(trace)
    names = {
        one["pid"]: one["args"]["name"]
        for one in trace["traceEvents"]
        if one["name"] == "process_name"
    }
    assert names == {
        0: "IPU 0 (simulated)",
        1: "IPU 1 (simulated)",
        900: "host (simulated)",
        1000: "host (measured)",
    }
    measured = [one for one in events if one["pid"] == 1000]
    assert Counter(one["name"] for one in measured)["data.load"] == 2
    call = next(one for one in measured if one["name"] == "call 1")
    assert (call["ts"], call["dur"]) == (pytest.approx(2e6), pytest.approx(5e5))
    assert not any("cycles" in one.get("args", {}) for one in measured)


def test_a_trace_without_an_estimate_has_what_was_measured():
    data = {**make_report(lanes=4), "estimate": None, "no_estimate": "no tiles"}
    trace = make_trace(Report(data), CUTS[0])
    assert {one["pid"] for one in check_events(trace)} == {1000}
    assert trace["otherData"]["estimate"] == "none: no tiles"


def test_the_size_is_estimated():
    for settings in ({}, {"stages": 4, "layers": 40}, {"accumulation": 200, "iterations": 4}):
        for cut in CUTS:
            report, trace = trace_of(cut, **settings)
            size = len(json.dumps(trace, separators=(",", ":")))
            assert 0.4 * size < trace_bytes(report, cut) < 2.5 * size, (settings, cut)


def test_a_large_trace_is_cut_to_20_mb():
    report = Report(make_report(layers=200, accumulation=64, iterations=40, runs=10))
    assert trace_bytes(report, CUTS[0]) > 10 * MOST_BYTES
    cut = choose_cut(report)
    assert cut is not CUTS[0]
    trace = make_trace(report, cut)
    assert len(json.dumps(trace, separators=(",", ":"))) < 1.5 * MOST_BYTES
    assert "fill, two periods and drain" in trace["otherData"]["shown"]


def test_more_calls_make_it_larger():
    sizes = [trace_bytes(Report(make_report(runs=runs)), CUTS[0]) for runs in (1, 2, 10)]
    assert sizes[0] < sizes[1] < sizes[2]
