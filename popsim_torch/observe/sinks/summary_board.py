"""Writes statistics and histograms of tensors to TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from popsim_torch.errors import UsageTypeError
from popsim_torch.observe.record import Record
from popsim_torch.observe.sinks.bins import edges_and_counts
from popsim_torch.observe.summary import summarise

__all__ = ["SummaryBoard"]

_SCALARS = (
    *("mean", "std", "minimum", "maximum", "norm", "absolute_mean", "nans", "infs", "zeros"),
    *("subnormals", "half_overflows", "half_underflows"),
)
_MOST_BINS = 64


class SummaryBoard:
    """Writes statistics and histograms of tensors to TensorBoard.

    As a sink of an :class:`OutfeedCallback` it writes the mean, deviation, norm and histogram of
    each tensor; tags are ``name/key/mean`` and similar, steps are epochs. As a sink of records it
    writes every statistic that a record has, with the tag ``<statistic>/<tensor>``, such as
    ``norm/Gradient___fc1.weight``; the number of dead channels, ``dead_channels/<tensor>``; and its
    histogram, in at most 64 bins, ``histogram/<tensor>``; steps are device iterations. Tags of
    other micro-batches and replicas than the first end with ``/micro_batch_1`` and ``/replica_1``.

    TensorBoard is not a requirement of this package: ``pip install tensorboard``.

    Args:
        writer: A ``torch.utils.tensorboard.SummaryWriter``, or another object with ``add_scalar``
            and ``add_histogram``, and ``add_histogram_raw`` for histograms of records. It stays
            open; ``close`` flushes it.

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

    def write_records(self, records: Sequence[Record]) -> None:
        """Write scalars and a histogram for each record.

        Args:
            records: The records.

        Raises:
            UsageTypeError: A record has a histogram, and the writer no ``add_histogram_raw``.
        """
        for record in records:
            tensor = _tag(record)
            for statistic in _SCALARS:
                number = getattr(record.statistics, statistic)
                if number is not None:
                    self._writer.add_scalar(f"{statistic}/{tensor}", number, record.step)
            channels = record.statistics.channels
            if channels is not None:
                dead = len(channels.dead)
                self._writer.add_scalar(f"dead_channels/{tensor}", dead, record.step)
            if record.statistics.histogram is not None:
                self._write_bins(f"histogram/{tensor}", record)

    def close(self) -> None:
        """Flush the writer, if it can; it stays open for what else it is used for."""
        flush = getattr(self._writer, "flush", None)
        if callable(flush):
            flush()

    def _write_bins(self, tag: str, record: Record) -> None:
        found = record.statistics
        assert found.histogram is not None
        if not callable(getattr(self._writer, "add_histogram_raw", None)):
            raise UsageTypeError(
                f"SummaryBoard: a {type(self._writer).__name__} has no method add_histogram_raw, "
                "which histograms of records need. Pass a torch.utils.tensorboard.SummaryWriter."
            )
        edges, counts = edges_and_counts(found.histogram, _MOST_BINS - 1)
        if not len(counts):
            return
        middles = (edges[1:] + edges[:-1]) / 2
        total = float(counts.sum())
        mean = float((middles * counts).sum() / total) if found.mean is None else found.mean
        squares = float((middles**2 * counts).sum()) if found.norm is None else found.norm**2
        self._writer.add_histogram_raw(
            tag,
            min=float(edges[0]) if found.minimum is None else found.minimum,
            max=float(edges[-1]) if found.maximum is None else found.maximum,
            num=total,
            sum=mean * total,
            sum_squares=squares,
            # A bin ends at its limit and begins at the one before: the first one is empty.
            bucket_limits=edges.tolist(),
            bucket_counts=[0, *counts.tolist()],
            global_step=record.step,
        )


def _tag(record: Record) -> str:
    tag = record.name
    if record.micro_batch:
        tag += f"/micro_batch_{record.micro_batch}"
    return f"{tag}/replica_{record.replica}" if record.replica else tag
