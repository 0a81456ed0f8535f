"""Opens the reports that this package writes, and says what other files are."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from popsim_torch.errors import Error, UsageTypeError
from popsim_torch.report.report import Report
from popsim_torch.report.schema import FORMAT, check_fields

__all__ = ["find_reports", "open_report", "read_report"]

_OLD = "popsim_torch report 1"
_MAX_BYTES = 1 << 30
_SQLITE = b"SQLite format 3\0"


def open_report(path: str | os.PathLike[str]) -> Report:
    """Open a report that ``Options.enableProfiling`` wrote; nothing in the file is executed.

    Args:
        path: The folder of the report, its ``profile.pop``, or a folder with one report inside.

    Returns:
        The report.

    Raises:
        UsageTypeError: ``path`` is not a path.
        Error: There is no report, or several; or the file is not one that this version reads:
            damaged, of an earlier version, or of another program. The message says which.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise UsageTypeError(f"report.open: {path!r} is not a path.")
    file = _find(Path(path))
    return Report(read_report(file), file.parent)


def _find(path: Path) -> Path:
    if not path.is_dir():
        if path.exists():
            return path
        raise Error(
            f"report.open: there is nothing at '{path}'. Run the program with "
            "Options.enableProfiling or autoReport.all; the report is written when the model is "
            "destroyed, or when the program ends."
        )
    inside = [path / "profile.pop"] if (path / "profile.pop").is_file() else find_reports(path)
    if len(inside) == 1:
        return inside[0]
    if not inside:
        raise Error(
            f"report.open: there is no report in '{path}': neither a profile.pop nor a folder "
            "with one."
        )
    names = ", ".join(f"'{one.parent}'" for one in inside[:5])
    more = f" and {len(inside) - 5} more" if len(inside) > 5 else ""
    raise Error(
        f"report.open: '{path}' has {len(inside)} reports. Open one of them: {names}{more}."
    )


def find_reports(folder: Path) -> list[Path]:
    """Return the ``profile.pop`` files in the folders of a folder, in the order of their names."""
    return sorted(folder.glob("*/profile.pop"))


def read_report(file: Path) -> dict[str, Any]:
    """Return the checked content of a ``profile.pop``.

    Args:
        file: The file.

    Raises:
        Error: It is not a report that this version reads.
    """
    report = _parse(file, _read(file))
    if not isinstance(report, dict) or "format" not in report:
        _refuse(file, "it is JSON, but not a report of popsim_torch")
    found = report["format"]
    if found == _OLD:
        _refuse(
            file,
            "it is a report of an earlier version of popsim_torch ('report 1', which has no "
            "estimates). Run the program again to get a new one",
        )
    if found != FORMAT:
        _refuse(file, f"its format is {str(found)[:60]!r}; this version reads {FORMAT!r}")
    problem = check_fields(report) or next(_wrong_indices(report), None)
    if problem is not None:
        _refuse(file, f"it is damaged: {problem}")
    return report


def _read(file: Path) -> bytes:
    try:
        size = file.stat().st_size
        if size > _MAX_BYTES:
            _refuse(file, f"it has {size} bytes; a report has at most {_MAX_BYTES}")
        return file.read_bytes()
    except OSError as error:
        raise Error(f"report.open: '{file}' cannot be read: {error.strerror}.") from error


def _parse(file: Path, content: bytes) -> Any:
    if content.startswith(_SQLITE):
        _refuse(
            file,
            "it is a database, as Graphcore's Poplar writes it; open it with PopVision Graph "
            "Analyser. popsim_torch writes JSON",
        )
    try:
        return json.loads(content.decode("utf-8"), parse_constant=_no_constant)
    except (UnicodeDecodeError, RecursionError):
        _refuse(file, "it is not JSON")
    except ValueError as error:
        is_cut = content.lstrip()[:1] == b"{" and not content.rstrip().endswith(b"}")
        if is_cut and FORMAT.encode() in content[:200]:
            _refuse(file, "its end is missing: the program was killed, or the disk is full")
        _refuse(file, f"it is not JSON ({error})")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _wrong_indices(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield what refers to something that is not there."""
    estimate = report["estimate"]
    if estimate is None:
        return
    ops, variables = len(estimate["ops"]), len(estimate["variables"])
    for place, op in enumerate(estimate["ops"]):
        for side in ("inputs", "outputs"):
            for one in op[side]:
                if not 0 <= one < variables:
                    yield f"estimate.ops[{place}].{side} has {one}, of {variables} variables"
    for place, one in enumerate(estimate["variables"]):
        for side in ("first_op", "last_op"):
            if one[side] is not None and not 0 <= one[side] < ops:
                yield f"estimate.variables[{place}].{side} is {one[side]}, of {ops} ops"
    for place, ipu in enumerate(estimate["ipus"]):
        for row in ipu["liveness"]:
            if len(row) != 3 or not 0 <= row[0] < ops or row[0] != int(row[0]):
                yield f"estimate.ipus[{place}].liveness has the row {row}, of {ops} ops"
        peak = ipu["memory"]["peak_op"]
        if peak is not None and not 0 <= peak < ops:
            yield f"estimate.ipus[{place}].memory.peak_op is {peak}, of {ops} ops"


def _refuse(file: Path, what: str) -> NoReturn:
    raise Error(f"report.open: '{file}' cannot be opened: {what}.")
