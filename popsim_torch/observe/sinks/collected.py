"""What a page shows of a run, as data: series of bounded length, and alarms."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from popsim_torch.observe.record import Record
from popsim_torch.observe.sinks.alarms import AlarmFinder
from popsim_torch.observe.sinks.bins import bands
from popsim_torch.observe.sinks.series import COLUMNS, Series, label

__all__ = ["Collected", "spelt", "thinned"]

_MOST_POINTS, _LEAST_POINTS, _POINTS_OF_PAGE = 1000, 100, 100_000
_MOST_HISTOGRAMS, _LEAST_HISTOGRAMS, _HISTOGRAMS_OF_PAGE = 128, 16, 10_000
"""How much there is of a tensor at most and at least, and of all tensors together."""
_COUNTED = ("nans", "infs", "zeros")


class Collected:
    """Collects the records of a run, with memory that does not grow with the number of steps."""

    def __init__(self) -> None:
        self.dropped = 0
        self._series: dict[str, Series] = {}
        self._worst: dict[str, dict[str, int]] = {}
        self._alarms = AlarmFinder()
        self._records = 0
        self._first: int | None = None
        self._last = 0

    def add(self, records: Iterable[Record]) -> None:
        """Take records, each tensor's in the order of its steps."""
        for record in records:
            name = label(record)
            if name not in self._series:
                self._series[name] = Series(name, _MOST_POINTS, _MOST_HISTOGRAMS)
                self._worst[name] = {"nans": 0, "infs": 0}
            self._series[name].add(record)
            worst = self._worst[name]
            for kind in worst:
                worst[kind] = max(worst[kind], getattr(record.statistics, kind))
            self._alarms.look(record)
            self._records += 1
            self._first = record.step if self._first is None else min(self._first, record.step)
            self._last = max(self._last, record.step)

    def data(self) -> dict[str, Any]:
        """Return the summary, the alarms and the tensors, of types that JSON has."""
        return {
            "summary": {
                "records": self._records,
                "first": self._first,
                "last": self._last,
                "dropped": self.dropped,
            },
            "alarms": [
                {
                    "name": alarm.name,
                    "kind": alarm.kind,
                    "text": alarm.text,
                    "first": alarm.first_step,
                    "last": alarm.last_step,
                    "times": alarm.times,
                }
                for alarm in self._alarms.alarms
            ],
            "tensors": self._tensors(),
        }

    def _tensors(self) -> list[dict[str, Any]]:
        number = max(1, len(self._series))
        points = max(_LEAST_POINTS, _POINTS_OF_PAGE // number)
        histograms = max(_LEAST_HISTOGRAMS, _HISTOGRAMS_OF_PAGE // number)
        return [self._tensor(name, points, histograms) for name in self._series]

    def _tensor(self, name: str, points: int, histograms: int) -> dict[str, Any]:
        series = self._series[name]
        shown, positions = series.kept(points), series.positions()
        last = series.last
        assert last is not None
        newest = {column: spelt(getattr(last, column)) for column in (*COLUMNS, *_COUNTED)}
        if last.zeros is not None and last.count:
            newest["zeros"] = spelt(last.zeros / last.count)
        return {
            "name": name,
            "count": last.count,
            "every": max(1, round(series.seen / len(shown))),
            "last": {**newest, "seen": series.seen},
            "worst": self._worst[name],
            "x": [spelt(positions[place]) for place in shown],
            **{
                column: [spelt(series.column(column)[place]) for place in shown]
                for column in (*COLUMNS, *_COUNTED)
                if column in series.has
            },
            "histogram": _histogram(series, histograms),
        }


def _histogram(series: Series, most: int) -> dict[str, Any] | None:
    places, rows = series.histograms()
    if not rows:
        return None
    shown = slice(None, None, _stride(len(rows), most))
    places, found = places[shown], bands(rows[shown])
    return {
        "x": [spelt(place) for place in places],
        "edges": [spelt(edge) for edge in found.edges.tolist()],
        "counts": found.counts.tolist(),
    }


def spelt(number: float | int | None) -> float | int | str | None:
    """Return a number for JSON, with six digits; NaN and infinities as text."""
    if number is None or isinstance(number, int):
        return number
    if not math.isfinite(number):
        return str(number)
    short = float(f"{number:.6g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def thinned(numbers: Sequence[Any], most: int = _MOST_POINTS) -> list[Any]:
    """Return at most ``most`` of the numbers, at equal distances."""
    return list(numbers[:: _stride(len(numbers), most)])


def _stride(length: int, most: int) -> int:
    return max(1, -(-length // most))
