"""The stages of a model as a table."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator, Sequence

from torch import nn

from popsim_torch.errors import UsageValueError
from popsim_torch.stages.assignment import get_pipeline_stage_assignment
from popsim_torch.stages.layers import PipelineStageRecord

__all__ = ["print_pipeline_stage_assignment_summary"]

_MIN_WIDTH = 30
_STAGE = "Pipeline stage"


def print_pipeline_stage_assignment_summary(
    model: nn.Module,
    line_length: int = 60,
    print_fn: Callable[[str], object] | None = None,
    *,
    details: bool = False,
) -> None:
    """Print a table with a line for each layer of a model: its name and type, and its stage.

    Args:
        model: The model, or an executor of it.
        line_length: Width of the table (characters), 30 or more; with details 54.
        print_fn: Called with each line; None for the built-in ``print``.
        details: Add columns with the number of parameters and their bytes, and the sums of each
            stage. A parameter that layers share counts in each of them.

    Raises:
        Error: The layers have changed since the stages were set.
        UsageValueError: ``line_length`` is too small for the columns.
    """
    least = _MIN_WIDTH + (24 if details else 0)
    if not isinstance(line_length, int) or line_length < least:
        raise UsageValueError(
            f"print_pipeline_stage_assignment_summary: line_length={line_length!r} is too small "
            f"for the columns. Pass an int, {least} or more."
        )
    show = builtins.print if print_fn is None else print_fn
    records = get_pipeline_stage_assignment(model)
    header = ["Layer (type)", _STAGE, *(["Parameters", "Bytes"] if details else [])]
    rows = list(_rows(records, details, 0))
    totals = _totals(rows) if details else []
    widths = _widths(line_length, details)
    show("_" * line_length)
    show(_line(header, widths))
    show("=" * line_length)
    for row in rows:
        show(_line(row, widths))
    show("=" * line_length)
    for row in totals:
        show(_line(row, widths))
    if totals:
        show("_" * line_length)


def _rows(records: Sequence[PipelineStageRecord], details: bool, depth: int) -> Iterator[list[str]]:
    for record in records:
        name = f"{'  ' * depth}{record.name} ({type(record.layer).__name__})"
        stage = "-" if record.stage is None else str(record.stage)
        if record.nested:
            yield [name, "", *(["", ""] if details else [])]
            yield from _rows(record.nested, details, depth + 1)
        else:
            sizes = _sizes(record.layer)
            yield [name, stage, *(map(str, sizes) if details else [])]


def _sizes(layer: nn.Module) -> tuple[int, int]:
    parameters = list(layer.parameters())
    return (
        sum(one.numel() for one in parameters),
        sum(one.numel() * one.element_size() for one in parameters),
    )


def _totals(rows: Sequence[list[str]]) -> list[list[str]]:
    sums: dict[str, list[int]] = {}
    for _, stage, count, size in rows:
        if stage:
            total = sums.setdefault(stage, [0, 0])
            total[0] += int(count)
            total[1] += int(size)
    return [[f"Stage {stage}", stage, *map(str, total)] for stage, total in sums.items()]


def _widths(line_length: int, details: bool) -> list[int]:
    """Return the widths of the columns; the first has what the others leave."""
    others = [len(_STAGE) + 2, 11, 10] if details else [max(line_length // 3, len(_STAGE) + 1)]
    return [line_length - sum(others), *others]


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Return a line; what is too long for its column is cut, and a blank keeps columns apart."""
    return "".join(
        f"{cell[: width - 1]:<{width}}" for cell, width in zip(cells, widths, strict=True)
    ).rstrip()
