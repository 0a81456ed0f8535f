"""Bins of histograms as sinks and pictures show them: fewer, and the same for all steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from popsim_torch.statistics import HistogramCounts

__all__ = ["BINADES", "Bands", "bands", "binades", "edges_and_counts"]

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

_EXPONENTS = 255
"""The exponents of finite float32 numbers; 0 stands for zero and subnormal numbers."""
BINADES = 2 * _EXPONENTS - 1
"""The length of what ``binades`` returns."""
_MANTISSA = 23
_SMALLEST = 2.0**-149


def edges_and_counts(histogram: HistogramCounts, most: int = 64) -> tuple[Floats, Counts]:
    """Return the edges of at most ``most`` bins that hold all finite values, and their counts.

    Bins are as fine as the number allows. Neighbours without values are one bin.

    Args:
        histogram: The counts of a tensor.
        most: The largest number of bins, at least 8.

    Returns:
        Edges, float64, shape ``(bins + 1,)``, ascending; and counts, int64, shape ``(bins,)``. Both
        are empty if there are no finite values.
    """
    for group in range(_MANTISSA):
        edges, counts = _joined(histogram, group)
        if len(counts) <= most:
            break
    return edges, counts


def _joined(histogram: HistogramCounts, group: int) -> tuple[Floats, Counts]:
    """Return edges and counts with ``2**group`` bins in one, and empty neighbours in one."""
    sides = [_side(side.numpy(), histogram.mantissa_bits, group) for side in _sides(histogram)]
    (low_edges, low), (high_edges, high) = sides
    edges = np.concatenate([-low_edges[::-1], high_edges[1:]])
    counts = np.concatenate([low[::-1], high])
    places = np.flatnonzero(counts)
    if not len(places):
        return np.empty(0), np.empty(0, np.int64)
    first, last = places[0], places[-1] + 1
    edges, counts = edges[first : last + 1], counts[first:last]
    # An empty bin goes into the empty bin before it.
    begins = np.ones(len(counts), bool)
    begins[1:] = (counts[1:] != 0) | (counts[:-1] != 0)
    return np.append(edges[:-1][begins], edges[-1]), counts[begins]


def _side(counts: Counts, mantissa_bits: int, group: int) -> tuple[Floats, Counts]:
    """Return the edges of the magnitudes of one sign, and the counts in between."""
    finite = counts[: _EXPONENTS << mantissa_bits]
    size = 1 << group
    padded = np.zeros(-(-len(finite) // size) * size, np.int64)
    padded[: len(finite)] = finite
    ends = np.minimum(np.arange(0, len(padded) + 1, size), len(finite))
    patterns = (ends << (_MANTISSA - mantissa_bits)).astype(np.uint32)
    patterns[-1] -= 1  # infinity's pattern: the largest finite number ends the last bin
    return patterns.view(np.float32).astype(np.float64), padded.reshape(-1, size).sum(1)


def _sides(histogram: HistogramCounts) -> tuple[torch.Tensor, torch.Tensor]:
    return histogram.negative, histogram.positive


def binades(histogram: HistogramCounts) -> Counts:
    """Return the number of finite values by sign and exponent, the lowest values first.

    Returns:
        Shape ``(BINADES,)``. The entry in the middle counts zeros and subnormal numbers; the ones
        before it negative numbers, the ones after it positive ones.
    """
    low, high = (
        side.numpy().reshape(-1, 1 << histogram.mantissa_bits).sum(1)[:_EXPONENTS]
        for side in _sides(histogram)
    )
    return np.concatenate([low[:0:-1], [low[0] + high[0]], high[1:]]).astype(np.int64)


@dataclass(frozen=True)
class Bands:
    """Histograms of several steps with the same bins.

    Attributes:
        edges: Float64, shape ``(bands + 1,)``, ascending.
        counts: int64, shape ``(steps, bands)``.
    """

    edges: Floats
    counts: Counts


def bands(rows: Sequence[Counts], most: int = 64) -> Bands:
    """Return histograms with the same bins: only exponents that any of them has values of.

    Args:
        rows: What ``binades`` returned for each step, at least one.
        most: The largest number of bins, at least 3.
    """
    table = np.stack(list(rows))
    middle = _EXPONENTS - 1
    used = np.flatnonzero(table.any(0))
    exponents = np.abs(used - middle)
    exponents = exponents[exponents > 0]
    if not len(exponents):
        return Bands(np.array([-_SMALLEST, _SMALLEST]), table[:, middle : middle + 1])
    low, high = int(exponents.min()), int(exponents.max()) + 1
    has = {sign: bool((sign * (used - middle) > 0).any()) for sign in (-1, 1)}
    size = 1
    while sum(has.values()) * -(-(high - low) // size) + 1 > most:
        size += 1
    starts = range(low, high, size)
    magnitudes = [_power(start) for start in starts] + [_power(high)]
    edges: list[float] = []
    columns = []
    if has[-1]:
        edges += [-edge for edge in reversed(magnitudes)]
        for start in reversed(starts):
            end = min(start + size, high)
            columns.append(table[:, middle - end + 1 : middle - start + 1].sum(1))
    else:
        edges.append(-magnitudes[0])
    columns.append(table[:, middle])
    if has[1]:
        edges += magnitudes
        for start in starts:
            columns.append(table[:, middle + start : middle + min(start + size, high)].sum(1))
    else:
        edges.append(magnitudes[0])
    return Bands(np.array(edges), np.stack(columns, 1))


def _power(exponent: int) -> float:
    """Return the smallest number of a float32 exponent as it is stored."""
    return float(2.0 ** (exponent - 127))
