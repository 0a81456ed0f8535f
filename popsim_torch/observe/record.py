"""What the observation of a run gives: a record for each tensor and place, and where it may go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from popsim_torch.statistics import Statistics

__all__ = ["Record", "RecordSink"]


class Record:
    """The statistics of one tensor at one place of a run.

    Args:
        name: The name of the tensor, as ``getTensorNames`` spells it.
        step: The device iteration, counted from 0 since the model was compiled.
        micro_batch: The micro-batch of the device iteration, counted from 0; None for a tensor of
            the update, and for statistics over all micro-batches.
        replica: The replica, counted from 0 in each process.
        statistics: The statistics, or a function that returns them when they are asked for.
        program: The number of the program, counted from 0: a model has a new one after ``destroy``,
            and a function has one for each loop.

    Attributes:
        name: As given; the same holds for the next four.
        step: The device iteration.
        micro_batch: The micro-batch.
        replica: The replica.
        program: The program.
    """

    __slots__ = ("_statistics", "micro_batch", "name", "program", "replica", "step")

    def __init__(
        self,
        name: str,
        step: int,
        micro_batch: int | None,
        replica: int,
        statistics: Statistics | Callable[[], Statistics],
        program: int = 0,
    ) -> None:
        self.name = name
        self.step = step
        self.micro_batch = micro_batch
        self.replica = replica
        self._statistics = statistics
        self.program = program

    @property
    def statistics(self) -> Statistics:
        """The statistics."""
        found = self._statistics
        if not isinstance(found, Statistics):
            found = self._statistics = found()
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Record) and self._parts() == other._parts()

    def __repr__(self) -> str:
        names = ("name", "step", "micro_batch", "replica", "statistics", "program")
        parts = (f"{name}={part!r}" for name, part in zip(names, self._parts(), strict=True))
        return f"Record({', '.join(parts)})"

    def __reduce__(self) -> tuple[type[Record], tuple[object, ...]]:
        return Record, self._parts()

    def _parts(self) -> tuple[str, int, int | None, int, Statistics, int]:
        place = self.name, self.step, self.micro_batch, self.replica
        return *place, self.statistics, self.program


class RecordSink(Protocol):
    """An object that gets records while a model runs, on a thread of their reader.

    Two methods more are called if the sink has them: ``records_dropped(count)`` with the number of
    records that were lost since the beginning, and ``show_queues(states)`` with a ``QueueState``
    for each queue of the running program, about 20 times per second.
    """

    def write_records(self, records: Sequence[Record]) -> None:
        """Take the records of one device iteration or a part of it, in the order of the program."""

    def close(self) -> None:
        """Finish: no more records come."""
