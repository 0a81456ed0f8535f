"""What the observation of a run gives: a record for each tensor and place, and where it may go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from popsim_torch.statistics import Statistics

__all__ = ["Record", "RecordSink"]


@dataclass(frozen=True)
class Record:
    """The statistics of one tensor at one place of a run.

    Attributes:
        name: The name of the tensor, as ``getTensorNames`` spells it.
        step: The device iteration, counted from 0 over all calls.
        micro_batch: The micro-batch of the device iteration, counted from 0; None for a tensor of
            the update, and for statistics over all micro-batches.
        replica: The replica, counted from 0.
        statistics: The statistics.
    """

    name: str
    step: int
    micro_batch: int | None
    replica: int
    statistics: Statistics


class RecordSink(Protocol):
    """An object that gets records while a model runs, on a thread of their reader."""

    def write_records(self, records: Sequence[Record]) -> None:
        """Take the records of one device iteration or a part of it, in the order of the program."""

    def close(self) -> None:
        """Finish: no more records come."""
