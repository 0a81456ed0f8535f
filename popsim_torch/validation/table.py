"""The results of the validation, as text and as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from popsim_torch.validation.rows import Row

__all__ = ["Result", "results_of", "text_of", "write_table"]

_BEGIN, _END = "<!-- the table -->", "<!-- end of the table -->"


@dataclass(frozen=True)
class Result:
    """A row of the table with our figure; see ``Row``."""

    number: str
    what: str
    unit: str
    published: float
    ours: float
    prototype: float | None
    error: float
    tolerance: float
    soft: bool
    within: bool
    source: str


def results_of(rows: Iterable[Row]) -> list[Result]:
    """Compute the figures of rows."""
    results = []
    for row in rows:
        ours = row.ours()
        error = ours / row.published - 1
        results.append(
            Result(
                row.number,
                row.what,
                row.unit,
                row.published,
                ours,
                row.prototype,
                error,
                row.tolerance,
                row.soft,
                abs(error) <= row.tolerance + 1e-12,
                row.source,
            )
        )
    return results


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _verdict(one: Result) -> str:
    return "within" if one.within else "outside, soft" if one.soft else "OUTSIDE"


def text_of(results: Sequence[Result]) -> str:
    """Return the table for a terminal."""
    head = (
        f"{'row':<4} {'published':>12} {'simulated':>12} {'prototype':>12} "
        f"{'error':>7} {'limit':>5} verdict        configuration"
    )
    lines = [head]
    for one in results:
        lines.append(
            f"{one.number:<4} {_number(one.published):>12} {_number(one.ours):>12} "
            f"{_number(one.prototype):>12} {one.error:>+7.1%} {one.tolerance:>5.0%} "
            f"{_verdict(one):<14} {one.what} ({one.unit})"
        )
    return "\n".join(lines)


def _markdown(results: Sequence[Result]) -> str:
    head = "| row | configuration | unit | published | simulated | error | limit | source |"
    lines = [head, "|" + "---|" * 8]
    for one in results:
        limit = f"{one.tolerance:.0%}" + (", soft" if one.soft else "")
        lines.append(
            f"| {one.number} | {one.what} | {one.unit} | {_number(one.published)} | "
            f"{_number(one.ours)} | {one.error:+.1%} | {limit} | {one.source} |"
        )
    return "\n".join(lines)


def write_table(path: str, results: Sequence[Result]) -> None:
    """Write the table into a page, between the marks for it.

    Args:
        path: The page.
        results: The rows.
    """
    page = Path(path)
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    page.write_text(f"{before}{_BEGIN}\n\n{_markdown(results)}\n\n{_END}{after}", encoding="utf-8")
