"""The results of the validation, as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from popsim_torch.validation.rows import Row

__all__ = ["Result", "number_text", "results_of", "text_of"]


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


def number_text(value: float | None) -> str:
    """Return a figure with three digits, or with all digits before the point; empty for None."""
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
            f"{one.number:<4} {number_text(one.published):>12} {number_text(one.ours):>12} "
            f"{number_text(one.prototype):>12} {one.error:>+7.1%} {one.tolerance:>5.0%} "
            f"{_verdict(one):<14} {one.what} ({one.unit})"
        )
    return "\n".join(lines)
