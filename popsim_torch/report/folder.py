"""The folder of a report: its name, and its files."""

from __future__ import annotations

import itertools
import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from popsim_torch import logs
from popsim_torch.errors import UsageTypeError
from popsim_torch.host_trace import HostEvent, stamp
from popsim_torch.report import page
from popsim_torch.report.report import Report
from popsim_torch.report.settings import Outputs
from popsim_torch.report.trace import choose_cut, make_trace, trace_bytes
from popsim_torch.version import __version__

__all__ = ["TIMED", "annotate", "choose_folder", "write_folder"]

TIMED = "popsim_report__"
"""How the names of folders with date and time begin."""
_taken: set[Path] = set()
"""The folders of the reports that this process has written or will write."""
_SPREAD = ("static", "estimate", "runs")


def choose_folder(
    directory: Path, name: str | None, *, training: bool, loop: bool, process: int = 0
) -> Path:
    """Return the folder of a report: each program of a process has its own.

    Args:
        directory: The folder of the reports.
        name: The name of the program; None if it has none.
        training: Whether it trains.
        loop: Whether it is a loop of a function, ``poptorch.repeat`` or ``fit``: such programs have
            a folder with date, time and process, and the reports of earlier runs stay.
        process: The number of this process among those that run the program together.
    """
    if name is None and loop:
        name = f"{TIMED}{stamp(datetime.now())}__{os.getpid()}"
    if name is None:
        name = "training" if training else "inference"
    if process:
        name = f"{name}_process_{process}"
    endings = itertools.chain([""], (f"_{number}" for number in itertools.count(2)))
    found = (directory / f"{name}{ending}" for ending in endings)
    folder = next(one for one in found if one not in _taken)
    _taken.add(folder)
    return folder


def write_folder(
    folder: Path,
    outputs: Outputs,
    data: Mapping[str, Any],
    marked: Iterable[HostEvent] = (),
) -> None:
    """Write the files of a report whose output is on; others that are there stay as they are.

    Args:
        folder: The folder; it is created if it does not exist.
        outputs: What to write.
        data: The report.
        marked: What channels marked on this computer.

    Raises:
        OSError: A file cannot be written.
    """
    data = _chosen(data, outputs)
    report = Report(data, folder)
    cut = choose_cut(report)
    _tell_size(report, outputs, trace_bytes(report, cut), cut.text)
    folder.mkdir(parents=True, exist_ok=True)
    if outputs.graph or outputs.execution:
        page.write(folder / "profile.pop", to_text(data))
    if outputs.execution:
        page.write(folder / "trace.json", _compact(make_trace(report, cut, marked)))
    if outputs.graph:
        page.write(folder / "report.html", page.report_page(report))
    if outputs.debug:
        page.write(folder / "debug.json", _compact(_debug(data)))
    page.write(folder / "framework.json", json.dumps(_framework(data), indent=1) + "\n")


def _chosen(data: Mapping[str, Any], outputs: Outputs) -> dict[str, Any]:
    """Return a report without the parts whose output is off."""
    chosen = dict(data)
    if not outputs.execution:
        chosen["runs"] = []
    if not outputs.graph:
        chosen["static"] = {**data["static"], "host_ops": []}
        if data["estimate"] is not None:
            chosen["estimate"] = _without_memory(data["estimate"])
    if not outputs.debug:
        chosen["static"] = {
            **chosen["static"],
            "host_ops": [{**op, "source": ""} for op in chosen["static"]["host_ops"]],
        }
        if chosen["estimate"] is not None:
            ops = [{**op, "source": ""} for op in chosen["estimate"]["ops"]]
            chosen["estimate"] = {**chosen["estimate"], "ops": ops}
    return chosen


def _without_memory(estimate: Mapping[str, Any]) -> dict[str, Any]:
    """Return an estimate without variables, tiles and liveness."""
    ipus = []
    for one in estimate["ipus"]:
        memory = {**one["memory"], "tiles": [], "always_tiles": [], "classes": {}}
        ipus.append({**one, "memory": memory, "liveness": []})
    ops = [{**op, "inputs": [], "outputs": []} for op in estimate["ops"]]
    return {**estimate, "variables": [], "ipus": ipus, "ops": ops}


def _tell_size(report: Report, outputs: Outputs, trace: int, left_out: str) -> None:
    """Say how large the report will be, before it is written."""
    lanes = sum(len(run.lanes) for run in report.runs)
    static = report.data["static"]
    size = 20_000 + 300 * len(static["host_ops"]) + 130 * lanes
    if report.estimate is not None:
        size += 450 * len(report.estimate["ops"]) + 260 * len(report.estimate["variables"])
        size += sum(14 * len(one["memory"]["tiles"]) for one in report.estimate["ipus"])
    total = size + (trace if outputs.execution else 0) + (size // 2 if outputs.graph else 0)
    logs.python.info(
        "The report of '%s' will have about %.1f MB, %.1f MB of it the trace of %d recorded calls.",
        report.name,
        total / 1e6,
        (trace if outputs.execution else 0) / 1e6,
        len(report.runs),
    )
    if outputs.execution and left_out:
        logs.python.warning(
            "The trace of '%s' would be too large. It shows %s.", report.name, left_out
        )


def to_text(data: Mapping[str, Any]) -> str:
    """Return a report as JSON: a line for each field, but for each entry of long lists."""
    lines = []
    for key, value in data.items():
        if key in _SPREAD and isinstance(value, dict):
            inner = ",\n".join(f'  "{name}": {_line(one)}' for name, one in value.items())
            lines.append(f' "{key}": {{\n{inner}\n }}')
        else:
            lines.append(f' "{key}": {_line(value)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _line(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(f"   {_compact(one)}" for one in value) + "]"
    return _compact(value)


def _compact(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _debug(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the module and the line of code of each op, as it runs on this computer."""
    return {
        "format": "popsim_torch debug 1",
        "program": data["name"],
        "ops": [
            {
                "op": op["name"],
                "kind": op["kind"],
                "phase": op["phase"],
                "module": op["scope"].replace("/", "."),
                "source": op["source"],
                "tensors": [one["name"] for one in op["outputs"] if one["name"]],
            }
            for op in data["static"]["host_ops"]
        ],
    }


def _framework(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return versions, and what runs the program."""
    return {
        "popsim_torch": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": platform.machine(),
        "threads": torch.get_num_threads(),
        "program": sys.argv[0] if sys.argv else "",
        "report": data["name"],
        "created": data["created"],
        "pid": data["pid"],
    }


def annotate(folder: str | os.PathLike[str], notes: Mapping[str, Any]) -> Path:
    """Write what your program wants to say about a run to ``app.json`` of a report's folder.

    It may be called before, during or after the run: reports never overwrite this file. The page
    shows the notes that are there when it is written, and ``Report.app`` reads them.

    Args:
        folder: The folder of the report, such as ``reports/training``; it is created if it does
            not exist.
        notes: What to say, by name; anything that JSON has. It replaces earlier notes.

    Returns:
        The path of the file.

    Raises:
        UsageTypeError: ``notes`` is no mapping, or JSON does not have one of its values.
        OSError: The file cannot be written.
    """
    if not isinstance(notes, Mapping):
        raise UsageTypeError(f"report.annotate: {notes!r} is no mapping from names to notes.")
    try:
        text = json.dumps(dict(notes), indent=1, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageTypeError(f"report.annotate: the notes cannot be written: {error}.") from None
    target = Path(folder) / "app.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    page.write(target, text + "\n")
    return target
