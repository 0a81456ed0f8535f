"""The statistics of a tensor over the steps, as columns of numbers."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable

import numpy as np

from popsim_torch.observe.record import Record
from popsim_torch.observe.sinks.bins import Counts, binades
from popsim_torch.statistics import HistogramCounts, Statistics

__all__ = ["COLUMNS", "Series", "label", "series_of"]

COLUMNS = ("mean", "std", "minimum", "maximum", "norm", "absolute_mean")
_COUNTED = ("nans", "infs", "zeros")
_PLACES = ("step", "micro_batch")
_FAR = 10


def label(record: Record) -> str:
    """Return the name that a tensor has where several replicas are shown."""
    return record.name if not record.replica else f"{record.name} (replica {record.replica})"


class Series:
    """The statistics of one tensor of one replica, in the order in which they come.

    A long run has more steps than a picture has pixels. If there are too many, one of each two
    neighbours is left out, and from then on one of two is kept: the first, unless the other one has
    NaN, an infinity or a far larger norm.

    Args:
        name: The label of the tensor.
        most: The largest number of kept steps; None for no limit.
        most_histograms: The largest number of kept histograms; None for no limit.
    """

    def __init__(
        self, name: str, most: int | None = None, most_histograms: int | None = None
    ) -> None:
        self.name = name
        self.seen = 0
        self.every = 1
        """Of this many records one is kept."""
        self.has: set[str] = set()
        """The columns of which any record had a number."""
        self.last: Statistics | None = None
        self._most = most
        self._columns = {column: array("d") for column in (*_PLACES, *COLUMNS, *_COUNTED)}
        self._micro_batches = 1
        self._histograms = _Histograms(most_histograms)

    def add(self, record: Record) -> None:
        """Take the next record of the tensor."""
        statistics = record.statistics
        place = (float(record.step), float(record.micro_batch or 0))
        self._micro_batches = max(self._micro_batches, 1 + (record.micro_batch or 0))
        self.last = statistics
        self._append(place, statistics)
        newest = len(self) - 1
        if self.seen % self.every:
            self._drop(newest - 1 if self._stands_out(newest, newest - 1) else newest)
        elif self._most is not None and len(self) > self._most:
            kept = self.kept(self._most)
            self._columns = {
                name: array("d", (column[place] for place in kept))
                for name, column in self._columns.items()
            }
            self.every *= 2
        self.seen += 1
        if statistics.histogram is not None:
            self._histograms.add(place, statistics.histogram)

    def kept(self, most: int) -> list[int]:
        """Return which of the kept records are left if one of two is left out until few remain."""
        places = list(range(len(self)))
        while len(places) > most:
            pairs = zip(places[::2], [*places[1::2], None], strict=False)
            places = [
                other if other is not None and self._stands_out(other, one) else one
                for one, other in pairs
            ]
        return places

    def _stands_out(self, place: int, other: int) -> bool:
        """Return whether a record has NaN, an infinity or a far larger norm, unlike another."""
        bad, bad_other = (
            self._columns["nans"][one] > 0 or self._columns["infs"][one] > 0
            for one in (place, other)
        )
        norms = self._columns["norm"]
        return bad > bad_other or (bad == bad_other and norms[place] > _FAR * norms[other])

    def _append(self, place: tuple[float, float], statistics: Statistics) -> None:
        for name, number in zip(_PLACES, place, strict=True):
            self._columns[name].append(number)
        for name in (*COLUMNS, *_COUNTED):
            number = getattr(statistics, name)
            if number is None:
                self._columns[name].append(math.nan)
            else:
                self.has.add(name)
                self._columns[name].append(number)

    def _drop(self, place: int) -> None:
        for column in self._columns.values():
            del column[place]

    def __len__(self) -> int:
        return len(self._columns["step"])

    def column(self, name: str) -> array[float]:
        """Return a statistic of all kept records; NaN where it was not asked for."""
        return self._columns[name]

    def positions(self) -> list[float]:
        """Return where the kept records are on an axis of steps: micro-batches are between them."""
        return self._positions(
            zip(self._columns["step"], self._columns["micro_batch"], strict=True)
        )

    def histograms(self) -> tuple[list[float], list[Counts]]:
        """Return the places of the kept histograms, and their counts by sign and exponent."""
        return self._positions(self._histograms.places), self._histograms.rows()

    def _positions(self, places: Iterable[tuple[float, float]]) -> list[float]:
        return [step + micro_batch / self._micro_batches for step, micro_batch in places]


class _Histograms:
    """Histograms without their empty ends."""

    def __init__(self, most: int | None) -> None:
        self.places: list[tuple[float, float]] = []
        self._kept: list[tuple[int, int, Counts]] = []
        self._most = most
        self._seen = 0
        self._every = 1

    def add(self, place: tuple[float, float], histogram: HistogramCounts) -> None:
        if self._seen % self._every == 0:
            counts = binades(histogram)
            used = np.flatnonzero(counts)
            start, end = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 0)
            self.places.append(place)
            self._kept.append((start, len(counts), counts[start:end].copy()))
            if self._most is not None and len(self.places) > self._most:
                self.places, self._kept = self.places[::2], self._kept[::2]
                self._every *= 2
        self._seen += 1

    def rows(self) -> list[Counts]:
        rows = []
        for start, length, part in self._kept:
            row = np.zeros(length, np.int64)
            row[start : start + len(part)] = part
            rows.append(row)
        return rows


def series_of(records: Iterable[Record]) -> dict[str, Series]:
    """Return all records as series, by label, in the order of their first records."""
    found: dict[str, Series] = {}
    for record in records:
        name = label(record)
        if name not in found:
            found[name] = Series(name)
        found[name].add(record)
    return found
