"""What the page "How true is it?" (``docs/how_true.md``) takes from the code: its tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from popsim_torch.errors import UsageValueError
from popsim_torch.machine import Estimate, MachineConstant, machine_constants
from popsim_torch.validation.table import Result, number_text

__all__ = ["constants_table", "fill", "models_table", "validation_table", "write_page"]

_GIGA = 1e9


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def validation_table(results: Iterable[Result]) -> str:
    """Return the table of published and simulated figures.

    Args:
        results: The rows.
    """
    head = ("row", "configuration", "unit", "published", "simulated", "error", "limit", "source")
    return _table(head, map(_validation_row, results))


def _validation_row(one: Result) -> tuple[str, ...]:
    limit = f"{one.tolerance:.0%}{', soft' if one.soft else ''}"
    outside = "" if one.within else " (outside)"
    return (
        *(one.number, one.what, one.unit, number_text(one.published), number_text(one.ours)),
        *(f"{one.error:+.1%}{outside}", limit, one.source),
    )


def constants_table() -> str:
    """Return the table of the model's constants."""
    head = ("constant", "value", "unit", "grade", "may be", "source")
    return _table(head, map(_constant_row, machine_constants()))


def _constant_row(one: MachineConstant) -> tuple[str, ...]:
    scale, unit = (_GIGA, f"G{one.unit}") if one.value >= _GIGA else (1.0, one.unit)
    least, value, most = (
        _constant_text(number / scale) for number in (one.least, one.value, one.most)
    )
    may_be = "" if one.least == one.most else f"{least} to {most}"
    return one.name, value, unit, one.grade, may_be, one.source


def _constant_text(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"


def models_table(estimates: Mapping[str, Estimate]) -> str:
    """Return the table of the models: how full the fullest tile is, and the shares of the grades.

    Args:
        estimates: The estimates, by the name of the model.
    """
    head = ("model", "fullest tile", "verdict", "cycles of grade A", "B", "C")
    return _table(head, (_model_row(name, one) for name, one in estimates.items()))


def _model_row(name: str, one: Estimate) -> tuple[str, ...]:
    share = one.peak_bytes / one.device.tile_bytes
    grades = (f"{one.grades[grade]:.0%}" for grade in "ABC")
    return name, f"{share:.0%}", one.verdict, *grades


def fill(text: str, name: str, content: str) -> str:
    """Return the text of a page with new content between its marks.

    Args:
        text: The page.
        name: The name of the marks ``<!-- the NAME -->`` and ``<!-- end of the NAME -->``.
        content: What comes between them.

    Raises:
        UsageValueError: The page has no such marks, or several.
    """
    begin, end = f"<!-- the {name} -->", f"<!-- end of the {name} -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed or begin in rest or end in after:
        raise UsageValueError(
            f"the page must have the marks {begin} and {end} once each, in this order. "
            "Put them on lines of their own, where the table belongs."
        )
    return f"{before}{begin}\n\n{content}\n\n{end}{after}"


def write_page(path: str, results: Sequence[Result], estimates: Mapping[str, Estimate]) -> None:
    """Write the tables into a page, between the marks for them.

    Args:
        path: The page.
        results: The rows of the table of published figures.
        estimates: The estimates of whole models, by name.

    Raises:
        UsageValueError: The page lacks marks; nothing is written.
    """
    page = Path(path)
    text = fill(page.read_text(encoding="utf-8"), "table", validation_table(results))
    text = fill(text, "constants", constants_table())
    text = fill(text, "models", models_table(estimates))
    page.write_text(text, encoding="utf-8")
