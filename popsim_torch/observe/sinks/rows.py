"""Records as rows of a file: CSV, and JSON lines."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from typing import Any

import torch

from popsim_torch.observe.record import Record
from popsim_torch.statistics import ChannelStatistics, HistogramCounts

__all__ = ["FIELDS", "csv_lines", "json_line"]

_PLACE = ("name", "step", "micro_batch", "replica")
_NUMBERS = (
    *("count", "nans", "infs", "mean", "std", "minimum", "maximum", "norm", "absolute_mean"),
    *("zeros", "subnormals", "half_overflows", "half_underflows"),
)
_CHANNELS = ("zeros", "nans", "infs", "mean", "norm", "minimum", "maximum")
FIELDS = (*_PLACE, *_NUMBERS, "fingerprint", "dead_channels")
"""The columns of a CSV file of records, and the first keys of a line of JSON."""


def fields(record: Record) -> dict[str, Any]:
    """Return the numbers of a record by ``FIELDS``; None for what is not there or not finite."""
    found = record.statistics
    row: dict[str, Any] = {name: getattr(record, name) for name in _PLACE}
    row.update({name: _finite(getattr(found, name)) for name in _NUMBERS})
    row["fingerprint"] = None if found.fingerprint is None else f"{found.fingerprint:016x}"
    row["dead_channels"] = None if found.channels is None else len(found.channels.dead)
    return row


def csv_lines(records: Sequence[Record], header: bool) -> str:
    """Return records as lines of CSV.

    Args:
        records: The records.
        header: Whether the names of the columns come first.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, FIELDS, lineterminator="\r\n")
    if header:
        writer.writeheader()
    writer.writerows(fields(record) for record in records)
    return text.getvalue()


def json_line(record: Record) -> str:
    """Return a record as a JSON object on one line: ``FIELDS``, and its arrays."""
    found = record.statistics
    row = fields(record)
    row["histogram"] = None if found.histogram is None else _bins(found.histogram)
    for name in ("top_values", "top_positions", "samples"):
        tensor: torch.Tensor | None = getattr(found, name)
        row[name] = None if tensor is None else [_spelt(number) for number in tensor.tolist()]
    row["channels"] = None if found.channels is None else _channels(found.channels)
    return json.dumps(row, allow_nan=False) + "\n"


def _bins(histogram: HistogramCounts) -> dict[str, Any]:
    """Return the bins that have values, by their number."""
    sides: dict[str, Any] = {"mantissa_bits": histogram.mantissa_bits}
    for name in ("negative", "positive"):
        counts: torch.Tensor = getattr(histogram, name)
        places = counts.nonzero().flatten().tolist()
        sides[name] = {str(place): int(counts[place]) for place in places}
    return sides


def _channels(channels: ChannelStatistics) -> dict[str, Any]:
    lists: dict[str, Any] = {"count": channels.count}
    for name in _CHANNELS:
        lists[name] = [_finite(number) for number in getattr(channels, name).tolist()]
    return lists


def _finite(number: float | int | None) -> float | int | None:
    return number if number is None or math.isfinite(number) else None


def _spelt(number: float | int) -> float | int | str:
    """Return a number, or the text ``nan``, ``inf`` or ``-inf``, which JSON has no numbers for."""
    return number if math.isfinite(number) else str(number)
