"""The data of a report's page: numbers as arrays in base64, texts by index."""

from __future__ import annotations

import array
import base64
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from popsim_torch.report import text
from popsim_torch.report.modules import ModuleCost, PhaseCost, tree
from popsim_torch.report.simulated_trace import HOST, Cut, SimulatedTrace
from popsim_torch.report.trace_events import Events

if TYPE_CHECKING:
    from popsim_torch.report.report import RecordedRun, Report

__all__ = ["report_data"]

_MOST_LANES = 20_000
_LARGEST = 2**31


class _Texts:
    """Gives each text a number, so that the page has it once."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __call__(self, texts: Iterable[str]) -> str:
        return _integers(self.numbers.setdefault(one, len(self.numbers)) for one in texts)


def _integers(values: Iterable[int]) -> str:
    return _encoded("i", (min(int(value), _LARGEST - 1) for value in values))


def _numbers(values: Iterable[float]) -> str:
    return _encoded("d", map(float, values))


def _encoded(kind: str, values: Iterable[float]) -> str:
    """Return the bytes of numbers, the lowest first, in base64."""
    made = array.array(kind, values)
    if sys.byteorder == "big":
        made.byteswap()
    return base64.b64encode(made.tobytes()).decode("ascii")


def report_data(report: Report) -> dict[str, Any]:
    """Return what the page shows of a report."""
    texts = _Texts()
    data: dict[str, Any] = {
        "name": report.name,
        "created": report.data["created"],
        "pid": report.data["pid"],
        "version": report.data["popsim_torch"],
        "calls": report.calls,
        "summary": list(text.figures(report)),
        "static": {**report.data["static"], "host_ops": len(report.data["static"]["host_ops"])},
        "app": dict(report.app),
        "runs": [_run(run, texts) for run in report.runs],
        "estimate": None if report.estimate is None else _estimate(report, texts),
        "why_no_estimate": report.why_no_estimate,
    }
    data["texts"] = list(texts.numbers)
    return data


def _estimate(report: Report, texts: _Texts) -> dict[str, Any]:
    estimate = report.estimate
    assert estimate is not None
    kept = ("device", "batch", "training", "verdict", "call", "update", "grades", "latency")
    more = ("without_formula", "schedule", "links", "stash", "traffic")
    return {
        **{name: estimate[name] for name in (*kept, *more)},
        "validation": text.validation(report),
        "insights": [vars(one) for one in report.insights],
        "ops": _ops(report, texts),
        "variables": _variables(estimate, texts),
        "ipus": [_ipu(one) for one in estimate["ipus"]],
        "modules": _modules(report),
        "purposes": [[name, *_phase(one)] for name, one in report.by_purpose().items()],
        "blocks": _blocks(report, texts),
    }


def _ops(report: Report, texts: _Texts) -> dict[str, Any]:
    ops = report.ops
    words = ("name", "kind", "module", "phase", "source", "formula", "grade", "plan")
    whole = ("stage", "ipu", "temporary_bytes", "recomputed")
    numbers = ("executions", "cycles", "compute", "exchange", "sync", "glue", "flops")
    columns: dict[str, Any] = {"count": len(ops)}
    columns |= {name: texts(getattr(op, name) for op in ops) for name in words}
    columns |= {name: _integers(getattr(op, name) for op in ops) for name in whole}
    columns |= {name: _numbers(getattr(op, name) for op in ops) for name in numbers}
    for side in ("inputs", "outputs"):
        lists = [getattr(op, side) for op in ops]
        columns[f"{side}_count"] = _integers(len(one) for one in lists)
        columns[side] = _integers(index for one in lists for index in one)
    return columns


def _variables(estimate: Mapping[str, Any], texts: _Texts) -> dict[str, Any]:
    rows = estimate["variables"]

    def place(name: str) -> str:
        return _integers(-1 if one[name] is None else one[name] for one in rows)

    return {
        "count": len(rows),
        "name": texts(one["name"] for one in rows),
        "class": texts(one["class"] for one in rows),
        "shape": texts(" x ".join(map(str, one["shape"])) for one in rows),
        "dtype": texts(one["dtype"] for one in rows),
        "ipu": _integers(one["ipu"] for one in rows),
        "copies": _integers(one["copies"] for one in rows),
        "tiles": _integers(one["tiles"] for one in rows),
        "bytes": _numbers(one["bytes"] for one in rows),
        "bytes_per_tile": _numbers(one["bytes_per_tile"] for one in rows),
        "first_op": place("first_op"),
        "last_op": place("last_op"),
    }


def _ipu(row: Mapping[str, Any]) -> dict[str, Any]:
    memory, liveness = row["memory"], row["liveness"]
    return {
        **{name: row[name] for name in ("ipu", "stages", "busy_cycles", "use")},
        "memory": {
            **memory,
            "tiles": _numbers(memory["tiles"]),
            "always_tiles": _numbers(memory["always_tiles"]),
        },
        "liveness": {
            "op": _integers(one[0] for one in liveness),
            "worst": _numbers(one[1] for one in liveness),
            "mean": _numbers(one[2] for one in liveness),
        },
    }


def _modules(report: Report) -> list[list[Any]]:
    """Return a row for each module, as a tree: path, depth, figures of all phases."""
    modules = report.by_module()
    return [_module(name, modules[name]) for name in tree(list(modules))]


def _module(name: str, cost: ModuleCost) -> list[Any]:
    depth = name.count(".") + 1 if name else 0
    phases = [_phase(one) for one in cost.phases]
    return [name, depth, cost.cycles, cost.flops, cost.variable_bytes, cost.grade, *phases]


def _phase(cost: PhaseCost) -> list[Any]:
    return [
        cost.ops,
        cost.cycles,
        cost.flops,
        cost.temporary_bytes,
        cost.grade,
        cost.without_formula,
    ]


def _blocks(report: Report, texts: _Texts) -> dict[str, Any]:
    """Return what the IPUs do in a call: fill, two periods and drain of one weight update."""
    estimate = report.estimate
    assert estimate is not None
    events = Events()
    SimulatedTrace(events, estimate, report.ops, Cut(2, 1, "no", 1)).add(1)
    made = events.sorted()
    rows = {
        (one["pid"], one["tid"]): one["args"]["name"]
        for one in made
        if one["name"] == "thread_name"
    }
    work = [one for one in made if one["ph"] == "X"]
    return {
        "host": HOST,
        "count": len(work),
        "pid": _integers(one["pid"] for one in work),
        "kind": texts(rows[one["pid"], one["tid"]] for one in work),
        "name": texts(one["name"] for one in work),
        "begin": _numbers(one["ts"] for one in work),
        "length": _numbers(one["dur"] for one in work),
        "cycles": _numbers(one["args"]["cycles"] for one in work),
        "stage": _integers(one["args"].get("stage", -1) for one in work),
    }


def _run(run: RecordedRun, texts: _Texts) -> dict[str, Any]:
    lanes = run.lanes[:_MOST_LANES]
    return {
        "number": run.number,
        "seconds": run.measured_seconds,
        "simulated_cycles": run.simulated_cycles,
        "left_out": len(run.lanes) - len(lanes),
        "count": len(lanes),
        "kind": texts(one["kind"] for one in lanes),
        "thread": _integers(one["thread"] for one in lanes),
        "stage": _integers(-1 if one["stage"] is None else one["stage"] for one in lanes),
        "micro_batch": _integers(
            -1 if one["micro_batch"] is None else one["micro_batch"] for one in lanes
        ),
        "begin": _numbers(one["begin"] for one in lanes),
        "length": _numbers(one["end"] - one["begin"] for one in lanes),
    }
