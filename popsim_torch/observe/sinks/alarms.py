"""Finds what is wrong in records: NaN, infinities, tensors of zeros, norms that explode."""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from popsim_torch.observe.record import Record
from popsim_torch.observe.sinks.series import label
from popsim_torch.statistics import Statistics

__all__ = ["Alarm", "AlarmFinder", "find_alarms"]

_EXPLODES = 100
"""A norm explodes if it is more than this many times the median."""
_REMEMBERED = 101
_LEAST = 3


@dataclass
class Alarm:
    """Something wrong with a tensor.

    Attributes:
        name: The tensor; of replicas other than 0, with the number of the replica.
        kind: ``"nan"``, ``"inf"``, ``"zeros"`` or ``"norm"``.
        text: What was found at the first step.
        first_step: The first step (device iteration) where it was found.
        last_step: The last one.
        times: The number of records in which it was found.
    """

    name: str
    kind: str
    text: str
    first_step: int
    last_step: int
    times: int = 1


class AlarmFinder:
    """Looks at records as they come, and remembers what is wrong.

    The kinds of alarm: a NaN; an infinity; a tensor with nothing but zeros; a norm of more than 100
    times the median of the tensor's last 101 norms (at least three).
    """

    def __init__(self) -> None:
        self._norms: dict[str, _Median] = {}
        self._found: dict[tuple[str, str], Alarm] = {}

    @property
    def alarms(self) -> list[Alarm]:
        """All alarms, those that came first at the beginning."""
        return list(self._found.values())

    def look(self, record: Record) -> list[Alarm]:
        """Return the alarms of a record that its tensor did not have before."""
        name = label(record)
        new = []
        for kind, text in self._wrong(name, record.statistics):
            alarm = self._found.get((name, kind))
            if alarm is None:
                alarm = Alarm(name, kind, text, record.step, record.step)
                self._found[name, kind] = alarm
                new.append(alarm)
            else:
                alarm.last_step = record.step
                alarm.times += 1
        return new

    def _wrong(self, name: str, found: Statistics) -> Iterable[tuple[str, str]]:
        if found.nans:
            yield "nan", f"{found.nans} of {found.count} values are NaN"
        if found.infs:
            yield "inf", f"{found.infs} of {found.count} values are infinite"
        if found.count and (found.zeros == found.count or _only_zeros(found)):
            yield "zeros", f"all {found.count} values are 0"
        if found.norm is not None and math.isfinite(found.norm):
            median = self._norms.setdefault(name, _Median())
            usual = median.value()
            if usual and found.norm > _EXPLODES * usual:
                yield "norm", f"norm {found.norm:.3g}, {found.norm / usual:.0f} times its median"
            median.add(found.norm)


def _only_zeros(found: Statistics) -> bool:
    return found.minimum == 0 and found.maximum == 0 and not found.nans and not found.infs


class _Median:
    """The median of the last numbers."""

    def __init__(self) -> None:
        self._newest: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, number: float) -> None:
        self._newest.append(number)
        insort(self._sorted, number)
        if len(self._newest) > _REMEMBERED:
            self._sorted.remove(self._newest.popleft())

    def value(self) -> float | None:
        if len(self._sorted) < _LEAST:
            return None
        return self._sorted[len(self._sorted) // 2]


def find_alarms(records: Iterable[Record]) -> list[Alarm]:
    """Return what is wrong in the records, in the order in which it came up.

    Args:
        records: Records, each tensor's in the order of its steps.
    """
    finder = AlarmFinder()
    for record in records:
        finder.look(record)
    return finder.alarms
