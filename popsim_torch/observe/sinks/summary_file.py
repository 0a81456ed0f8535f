"""Writes statistics of tensors to CSV files and to files of JSON lines."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from popsim_torch.errors import UsageTypeError, UsageValueError
from popsim_torch.observe.record import Record
from popsim_torch.observe.sinks.rows import FIELDS, csv_lines, json_line
from popsim_torch.observe.summary import summarise

__all__ = ["SummaryFile"]

_QUANTILES = (0.01, 0.5, 0.99)
_FORMS = (".csv", ".jsonl")


class SummaryFile:
    """Appends lines of statistics to a file: of the tensors of a callback, or of records.

    A ``.csv`` file begins with the names of its columns; a line of a ``.jsonl`` file is a JSON
    object. As a sink of an :class:`OutfeedCallback` it writes a line for each tensor and epoch: the
    callback's name, epoch (from 1), key and shape, and the statistics of ``summarise`` with three
    quantiles. As a sink of records it writes a line for each record: ``name``, ``step``,
    ``micro_batch``, ``replica``, all numbers of its statistics, the fingerprint in hexadecimal
    digits, and the number of dead channels. Lines of JSON also have the histogram (the counts by
    number of the bin), the top values, the samples and the numbers of each channel.

    Numbers that are not finite are empty, or null; ``nans`` and ``infs`` count them. The file is
    complete after each call, also if the process is killed later.

    Args:
        path: The path of the file, which ends with ``.csv`` or ``.jsonl``. Existing content is
            kept.

    Raises:
        UsageTypeError: ``path`` is not a path.
        UsageValueError: The path ends otherwise.
        OSError: The file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise UsageTypeError(f"SummaryFile: {path!r} is not a path.")
        self.path = Path(path)
        if self.path.suffix not in _FORMS:
            raise UsageValueError(
                f"SummaryFile: '{self.path}' ends with neither {' nor '.join(_FORMS)}, which say "
                "how it is written."
            )
        with self.path.open("a", encoding="utf-8"):
            pass  # opening the file now reports a mistake at once, not at the end of an epoch

    def write(self, name: str, epoch: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Append the statistics of the tensors of an epoch.

        Args:
            name: Headline of the callback.
            epoch: The epoch, counted from 1.
            tensors: The tensors by key.
        """
        records = [
            {"name": name, "epoch": epoch, "key": key, **_statistics(tensor)}
            for key, tensor in tensors.items()
        ]
        if self.path.suffix == ".jsonl":
            self._append("".join(json.dumps(record) + "\n" for record in records))
        elif records:
            text = io.StringIO()
            writer = csv.DictWriter(text, list(records[0]))
            if self._begins(list(records[0])):
                writer.writeheader()
            for record in records:
                writer.writerow({**record, "shape": "x".join(map(str, record["shape"]))})
            self._append(text.getvalue())

    def write_records(self, records: Sequence[Record]) -> None:
        """Append a line for each record.

        Args:
            records: The records.

        Raises:
            UsageValueError: The CSV file has other columns.
            OSError: The file cannot be written.
        """
        if self.path.suffix == ".jsonl":
            self._append("".join(map(json_line, records)))
        elif records:
            self._append(csv_lines(records, self._begins(FIELDS)))

    def close(self) -> None:
        """Do nothing: the file is complete after each call."""

    def _begins(self, columns: Sequence[str]) -> bool:
        """Return whether the CSV file is empty; refuse one that has other columns."""
        with self.path.open("a+", encoding="utf-8", newline="") as file:
            file.seek(0)
            header = next(csv.reader(file), None)
        if header is not None and header != list(columns):
            raise UsageValueError(
                f"SummaryFile: '{self.path}' has other columns: its first line is "
                f"'{','.join(header)[:80]}'. Tensors of a callback and records go to different "
                "files."
            )
        return header is None

    def _append(self, text: str) -> None:
        """Write lines at the end of the file, below an unfinished line of a killed process."""
        with self.path.open("a+b") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    text = "\n" + text
            file.write(text.encode("utf-8"))


def _statistics(tensor: torch.Tensor) -> dict[str, Any]:
    found = summarise(tensor, _QUANTILES)
    numbers = {
        "mean": found.mean,
        "std": found.std,
        "minimum": found.minimum,
        "maximum": found.maximum,
        "norm": found.norm,
        **{f"quantile_{share:g}": found.quantiles.get(share, math.nan) for share in _QUANTILES},
    }
    return {
        "shape": list(tensor.shape),
        "count": found.count,
        **{key: value if math.isfinite(value) else None for key, value in numbers.items()},
        "nans": found.nans,
        "infs": found.infs,
        "zeros": found.zeros,
        "subnormals": found.subnormals,
    }
