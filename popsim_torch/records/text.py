"""Runs as text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from popsim_torch.dtypes import dtype_name
from popsim_torch.records.tensors import RecordedTensor, printable
from popsim_torch.tables import table, terminal_width

if TYPE_CHECKING:
    from popsim_torch.records.reader import Run

__all__ = ["listed", "short", "type_text"]

_MOST_NAMES = 4

_HEADER = ("Name", "Type", "Records", "Mean", "Std", "Norm", "NaNs", "infs")


def run_text(run: Run, rows: Iterable[tuple[RecordedTensor, Sequence[Any]]]) -> str:
    """Return a line about a run, and a table of its tensors with their last statistics.

    Args:
        run: The run.
        rows: Each tensor, with the number of its records, sums of NaN and infinities, the last
            step, and mean, standard deviation and norm at the last step.
    """
    steps = run.steps
    span = f"steps {steps[0]} to {steps[-1]}" if steps else "no records"
    facts = f"{printable(str(run.path))}: {span}, {run.state}, begun {printable(run.created)}"
    lines = [_cells(tensor, *numbers) for tensor, numbers in rows]
    if not lines:
        return facts
    widths = [max(len(line[i]) for line in [_HEADER, *lines]) for i in range(len(_HEADER))]
    shown = table(_HEADER, lines, widths, width=terminal_width())
    return "\n".join([facts, *(line.rstrip() for line in shown.splitlines())])


def _cells(
    tensor: RecordedTensor,
    count: Any,
    nans: Any,
    infs: Any,
    _: Any,
    *moments: Any,
) -> tuple[str, ...]:
    numbers = [short(math.nan if one is None else float(one)) for one in moments]
    return printable(tensor.name), type_text(tensor), str(count), *numbers, str(nans), str(infs)


def type_text(tensor: RecordedTensor) -> str:
    """Return dtype and shape of a tensor, as far as they are known."""
    parts = [
        "" if tensor.dtype is None else dtype_name(tensor.dtype),
        "" if tensor.shape is None else str(tensor.shape),
    ]
    return " ".join(filter(None, parts)) or "-"


def short(number: float | None) -> str:
    """Return a number with six digits; a dash for None."""
    return "-" if number is None else f"{number:.6g}"


def listed(names: Sequence[str]) -> str:
    """Return names for a line of a report: some, and how many more there are."""
    text = ", ".join(printable(name) for name in names[:_MOST_NAMES])
    return text if len(names) <= _MOST_NAMES else f"{text} and {len(names) - _MOST_NAMES} more"
