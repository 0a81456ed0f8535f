"""Writes a run as one HTML page that needs no network."""

from __future__ import annotations

import html
import json
import os
import re
import time
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from popsim_torch.errors import UsageTypeError, UsageValueError
from popsim_torch.observe.record import Record
from popsim_torch.observe.sinks.collected import Collected
from popsim_torch.observe.sinks.difference import difference

__all__ = ["HtmlPage", "write_page"]

_FOLDER = Path(__file__).parent
_PARTS = {
    "uplot": "vendor/uPlot.iife.min.js",
    "uplot_style": "vendor/uPlot.min.css",
    "style": "page/page.css",
    "charts": "page/charts.js",
    "script": "page/page.js",
}
_SHARE = 0.02
"""The share of the time that writing the page again and again may take."""


class HtmlPage:
    """A sink of records that writes one HTML page: alarms, a table of all tensors, charts.

    The page is a file of its own: it needs no network and no other file. It is written while the
    model runs, so reload it to see more, and at the end.

    Args:
        path: The path of the page. An existing file is replaced.
        title: The headline of the page.
        seconds: The least time between two writes while the model runs; ``math.inf`` to write at
            the end only. Writing takes at most 2 % of the time, whatever this is.

    Raises:
        UsageTypeError: ``path`` is not a path.
        UsageValueError: ``seconds`` is negative or NaN.
        OSError: The file cannot be written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        title: str = "Observed run",
        seconds: float = 10.0,
    ) -> None:
        self.path = _checked("HtmlPage", path)
        if not seconds >= 0:
            raise UsageValueError(f"HtmlPage: seconds is 0 or more, got {seconds!r}.")
        self._title = title
        self._seconds = seconds
        self._collected = Collected()
        self._pending = False
        self._write()

    def write_records(self, records: Sequence[Record]) -> None:
        """Take records, and write the page if the last time is long enough ago."""
        self._collected.add(records)
        self._pending |= bool(records)
        if self._pending and time.monotonic() >= self._next:
            self._write()

    def records_dropped(self, count: int) -> None:
        """Take the number of records that were dropped since the beginning."""
        self._pending |= count != self._collected.dropped
        self._collected.dropped = count

    def close(self) -> None:
        """Write the page a last time."""
        if self._pending:
            self._write()

    def _write(self) -> None:
        begin = time.monotonic()
        _write_file(self.path, _page(self._title, self._collected.data()))
        now = time.monotonic()
        self._next = now + max(self._seconds, (now - begin) / _SHARE)
        self._pending = False


def write_page(
    path: str | os.PathLike[str],
    records: Iterable[Record],
    *,
    title: str = "Observed run",
    other: Iterable[Record] | None = None,
    labels: tuple[str, str] = ("this run", "other run"),
) -> None:
    """Write records as one HTML page, as :class:`HtmlPage` does.

    Args:
        path: The path of the page. An existing file is replaced.
        records: The records, each tensor's in the order of its steps.
        title: The headline of the page.
        other: The records of another run. The page gets a section that shows where both differ: by
            tensor the first step, both norms, and their relative difference.
        labels: What the two runs are called.

    Raises:
        UsageTypeError: ``path`` is not a path.
        OSError: The file cannot be written.
    """
    checked = _checked("write_page", path)
    listed = list(records)
    collected = Collected()
    collected.add(listed)
    found = None if other is None else difference(listed, other)
    _write_file(checked, _page(title, collected.data(), found, labels))


def _checked(caller: str, path: Any) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise UsageTypeError(f"{caller}: {path!r} is not a path.")
    return Path(path)


def _write_file(path: Path, text: str) -> None:
    """Write a file such that whoever opens it finds the old one or the new one, each whole."""
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        new.write_text(text, encoding="utf-8")
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def _page(
    title: str,
    data: dict[str, Any],
    found: dict[str, Any] | None = None,
    labels: tuple[str, str] = ("", ""),
) -> str:
    made = datetime.now().strftime("%Y-%m-%d %H:%M")
    parts = {key: _read(name) for key, name in _PARTS.items()}
    parts["title"] = html.escape(title)
    parts["data"] = script_json({**data, "made": made, "labels": labels, "difference": found})
    # One pass: what is put in is not looked at again.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _read("page/page.html"))


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def script_json(data: Any) -> str:
    """Return JSON for a ``script`` element: nothing in it ends the element or begins a comment."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
