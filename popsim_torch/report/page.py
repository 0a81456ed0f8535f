"""``report.html``: a report as one page that needs no network and no other file."""

from __future__ import annotations

import html
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from popsim_torch.observe.sinks import html_page
from popsim_torch.report import text
from popsim_torch.report.page_data import report_data

if TYPE_CHECKING:
    from popsim_torch.report.comparison import ComparedFigure, Comparison
    from popsim_torch.report.report import Report

__all__ = ["comparison_page", "report_page", "write"]

_OWN = Path(__file__).parent / "page"
_HOUSE = Path(html_page.__file__).parent
_PARTS = {
    "uplot": (_HOUSE / "vendor/uPlot.iife.min.js",),
    "uplot_style": (_HOUSE / "vendor/uPlot.min.css",),
    "style": (_HOUSE / "page/page.css", _OWN / "report.css"),
    "script": tuple(
        _OWN / name
        for name in (
            *("base.js", "tables.js", "lines.js", "blocks.js", "summary.js", "memory.js"),
            *("operations.js", "execution.js", "comparison.js", "report.js"),
        )
    ),
}
_MOST_ROWS = 2000


def report_page(report: Report) -> str:
    """Return the page of a report."""
    return _page(f"Report of {report.name}", {"reports": [report_data(report)]})


def comparison_page(comparison: Comparison) -> str:
    """Return the page of two reports side by side."""
    labels = comparison.labels
    data = {
        "reports": [report_data(one) for one in (comparison.first, comparison.second)],
        "comparison": {
            "labels": labels,
            "simulated": _rows(one for one in comparison.figures() if one.simulated),
            "others": _rows(one for one in comparison.figures() if not one.simulated),
            "modules": _rows(comparison.modules()),
            "ops": _rows(one for one in comparison.ops() if one.first != one.second),
            "validation": text.validation(comparison.second),
        },
    }
    return _page(f"{labels[0]} and {labels[1]}", data)


def _rows(figures: Any) -> list[list[Any]]:
    listed: Sequence[ComparedFigure] = list(figures)
    return [
        [one.name, one.first_text, one.second_text, one.change, one.first, one.second]
        for one in listed[:_MOST_ROWS]
    ]


def _page(title: str, data: Mapping[str, Any]) -> str:
    parts = {
        key: "\n".join(path.read_text(encoding="utf-8") for path in paths)
        for key, paths in _PARTS.items()
    }
    parts["title"] = html.escape(title)
    parts["data"] = html_page.script_json(data)
    # One pass: what is put in is not looked at again.
    template = (_OWN / "report.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def write(path: Path, content: str) -> None:
    """Write a file such that whoever opens it finds the old one or the new one, each whole.

    Args:
        path: The file.
        content: Its content.

    Raises:
        OSError: It cannot be written.
    """
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        new.write_text(content, encoding="utf-8")
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)
