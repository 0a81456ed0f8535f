"""Prints the stages of a model as a table."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from popsim_torch.errors import UsageValueError
from popsim_torch.stages.assignment import get_pipeline_stage_assignment
from popsim_torch.stages.balance import TimedOp, layer_times
from popsim_torch.stages.layers import PipelineStageRecord, leaves

__all__ = ["print_pipeline_stage_assignment_summary"]

_MIN_WIDTH = 30
_STAGE = "Pipeline stage"


def print_pipeline_stage_assignment_summary(
    model: nn.Module,
    line_length: int = 60,
    print_fn: Callable[[str], object] | None = None,
    *,
    details: bool = False,
    profile: Iterable[TimedOp] | None = None,
    prefix: str = "",
) -> None:
    """Print a table with a line for each layer of a model: its name and type, and its stage.

    Args:
        model: The model, or an executor of it.
        line_length: Width of the table (characters), 30 or more; 24 more with details, and with a
            profile.
        print_fn: Called with each line; None for the built-in ``print``.
        details: Add columns with the number of parameters and their bytes, and the sums of each
            stage. A parameter that layers share counts in each of them.
        profile: The result of ``executor.profile(...)`` for the model. Adds columns with the
            microseconds of each layer's forward and backward pass, and the sums of each stage.
        prefix: The name of ``model`` in the profiled model; empty if it is the profiled model.

    Raises:
        Error: The layers have changed since the stages were set.
        UsageValueError: ``line_length`` is too small for the columns.
    """
    least = _MIN_WIDTH + 24 * (details + (profile is not None))
    if not isinstance(line_length, int) or line_length < least:
        raise UsageValueError(
            f"print_pipeline_stage_assignment_summary: line_length={line_length!r} is too small "
            f"for the columns. Pass an int, {least} or more."
        )
    show = builtins.print if print_fn is None else print_fn
    records = get_pipeline_stage_assignment(model)
    columns = _sizes_of(records) if details else []
    if profile is not None:
        columns += _times_of(records, profile, prefix)
    header = ["Layer (type)", _STAGE, *(column.name for column in columns)]
    rows = list(_rows(records, columns, iter(range(len(list(leaves(records))))), 0))
    totals = _totals(records, columns)
    widths = _widths(line_length, len(columns))
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


@dataclass(frozen=True)
class _Column:
    """A column of the table: a figure of each layer, and its format."""

    name: str
    values: Sequence[float]
    form: str = "d"

    def text(self, places: Iterable[int]) -> str:
        """Return the sum over some layers as a string."""
        return format(sum(self.values[place] for place in places), self.form)


def _sizes_of(records: Sequence[PipelineStageRecord]) -> list[_Column]:
    parameters = [list(record.layer.parameters()) for record in leaves(records)]
    return [
        _Column("Parameters", [sum(one.numel() for one in own) for own in parameters]),
        _Column("Bytes", [sum(one.nbytes for one in own) for own in parameters]),
    ]


def _times_of(
    records: Sequence[PipelineStageRecord], profile: Iterable[TimedOp], prefix: str
) -> list[_Column]:
    times = layer_times(records, profile, prefix)
    return [
        _Column("Forward us", [1e6 * time.forward for time in times], ".1f"),
        _Column("Backward us", [1e6 * time.backward for time in times], ".1f"),
    ]


def _rows(
    records: Sequence[PipelineStageRecord],
    columns: Sequence[_Column],
    places: Iterator[int],
    depth: int,
) -> Iterator[list[str]]:
    """Yield a line for each record; ``places`` counts the layers."""
    for record in records:
        name = f"{'  ' * depth}{record.name} ({type(record.layer).__name__})"
        if record.nested:
            yield [name, "", *("" for _ in columns)]
            yield from _rows(record.nested, columns, places, depth + 1)
            continue
        place = next(places)
        stage = "-" if record.stage is None else str(record.stage)
        yield [name, stage, *(column.text([place]) for column in columns)]


def _totals(records: Sequence[PipelineStageRecord], columns: Sequence[_Column]) -> list[list[str]]:
    places: dict[str, list[int]] = {}
    for place, record in enumerate(leaves(records) if columns else []):
        stage = "-" if record.stage is None else str(record.stage)
        places.setdefault(stage, []).append(place)
    return [
        [f"Stage {stage}", stage, *(column.text(own) for column in columns)]
        for stage, own in places.items()
    ]


def _widths(line_length: int, num_columns: int) -> list[int]:
    """Return the widths of the columns; the first one gets the rest of the line."""
    stage = len(_STAGE) + 2 if num_columns else max(line_length // 3, len(_STAGE) + 1)
    others = [stage, *(12 for _ in range(num_columns))]
    return [line_length - sum(others), *others]


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Return a line; cells that are too long are cut, and spaces separate the columns."""
    return "".join(
        f"{cell[: width - 1]:<{width}}" for cell, width in zip(cells, widths, strict=True)
    ).rstrip()
