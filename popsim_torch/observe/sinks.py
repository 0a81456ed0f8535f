"""Writes statistics of captured tensors to files and to TensorBoard."""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from popsim_torch.errors import UsageTypeError, UsageValueError
from popsim_torch.observe.summary import summarise

__all__ = ["Sink", "SummaryBoard", "SummaryFile"]

_QUANTILES = (0.01, 0.5, 0.99)
_FORMS = (".csv", ".jsonl")


class Sink(Protocol):
    """An object to which an ``OutfeedCallback`` can pass its tensors."""

    def write(self, name: str, epoch: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the tensors of an epoch.

        Args:
            name: Headline of the callback.
            epoch: The epoch, counted from 1.
            tensors: The tensors by key.
        """


class SummaryFile:
    """Appends a line of statistics for each tensor and epoch to a file.

    A ``.csv`` file begins with the names of its columns; a line of a ``.jsonl`` file is a JSON
    object. Both have the callback's name, epoch (from 1), key and shape, and the statistics of
    ``summarise`` with three quantiles. Numbers that are not finite are empty, or null; ``nans`` and
    ``infs`` count them.

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
        with self.path.open("a", encoding="utf-8", newline="") as file:
            if self.path.suffix == ".jsonl":
                file.writelines(json.dumps(record) + "\n" for record in records)
            elif records:
                writer = csv.DictWriter(file, list(records[0]))
                if file.tell() == 0:
                    writer.writeheader()
                for record in records:
                    writer.writerow({**record, "shape": "x".join(map(str, record["shape"]))})


class SummaryBoard:
    """Writes the mean, deviation, norm and histogram of each tensor to TensorBoard.

    Tags are ``name/key/mean`` and similar; steps are epochs.

    Args:
        writer: A ``torch.utils.tensorboard.SummaryWriter``, or another object with ``add_scalar``
            and ``add_histogram``.

    Raises:
        UsageTypeError: The writer does not have these methods.
    """

    def __init__(self, writer: Any) -> None:
        for method in ("add_scalar", "add_histogram"):
            if not callable(getattr(writer, method, None)):
                raise UsageTypeError(
                    f"SummaryBoard: a {type(writer).__name__} has no method {method}. Pass a "
                    "torch.utils.tensorboard.SummaryWriter."
                )
        self._writer = writer

    def write(self, name: str, epoch: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write scalars and a histogram for each tensor of an epoch.

        Args:
            name: Headline of the callback.
            epoch: The epoch, counted from 1.
            tensors: The tensors by key. TensorBoard accepts no histogram of values that are not
                finite.
        """
        for key, tensor in tensors.items():
            found = summarise(tensor)
            tag = f"{name}/{key}"
            for figure in ("mean", "std", "norm"):
                self._writer.add_scalar(f"{tag}/{figure}", getattr(found, figure), epoch)
            if found.count and not found.nans and not found.infs:
                self._writer.add_histogram(tag, tensor.float(), epoch)


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
