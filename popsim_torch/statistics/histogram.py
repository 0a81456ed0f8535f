"""Counts of values by sign, exponent and the first bits of the mantissa, and what they say."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from popsim_torch.errors import UsageValueError

__all__ = ["HistogramCounts"]


@dataclass(frozen=True)
class HistogramCounts:
    """The number of values in each bin.

    Attributes:
        mantissa_bits: As in ``Histogram``.
        negative: int64, shape ``(256 << mantissa_bits,)``: negative values (and -0.0), by the upper
            bits of the magnitude in float32: exponent, then mantissa. The bins of exponent 255 have
            infinities and NaN.
        positive: The same for positive values.
    """

    mantissa_bits: int
    negative: torch.Tensor
    positive: torch.Tensor

    def edges(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the lower and the upper edge of each bin of finite values, in ascending order.

        A bin of positive values has its lower edge, a bin of negative values its upper edge.

        Returns:
            Two tensors, float64, shape ``(2 * (255 << mantissa_bits),)``: negative bins from
            -2**128 to 0, then positive ones from 0 to 2**128.
        """
        magnitudes = self._magnitude_edges()
        inner, outer = magnitudes[:-1], magnitudes[1:]
        return torch.cat([-outer.flip(0), inner]), torch.cat([-inner.flip(0), outer])

    def counts(self) -> torch.Tensor:
        """Return the number of values in each bin of ``edges``.

        Returns:
            int64, shape ``(2 * (255 << mantissa_bits),)``.
        """
        num_finite = 255 << self.mantissa_bits
        return torch.cat([self.negative[:num_finite].flip(0), self.positive[:num_finite]])

    def quantile(self, q: float) -> float:
        """Return a quantile of the finite values, as if those of a bin were at equal distances.

        The error is less than the width of a bin, which is at most
        ``1 / (1 << mantissa_bits)`` of the value.

        Args:
            q: The share of smaller values, from 0 to 1; 0.5 is the median.

        Returns:
            NaN if there are no finite values.

        Raises:
            UsageValueError: The share is not from 0 to 1.
        """
        if not 0 <= q <= 1:
            raise UsageValueError(f"HistogramCounts.quantile: q is from 0 to 1, got {q!r}.")
        counts = self.counts()
        filled = counts.nonzero().reshape(-1)
        if not len(filled):
            return math.nan
        lower, upper = (edge[filled] for edge in self.edges())
        inside = counts[filled]
        below = inside.cumsum(0)
        place = q * float(below[-1])
        # The first bin that reaches up to this place.
        found = min(int((below.double() < place).sum()), len(filled) - 1)
        part = (place - float(below[found] - inside[found])) / float(inside[found])
        return float(lower[found] + part * (upper[found] - lower[found]))

    def rebinned(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the counts of at most n wider bins that cover all finite values, for pictures.

        Bins are joined, never divided, so the counts are exact. Neighbours without values become
        one bin. If there are still too many, those nearest to 0 become one.

        Args:
            n: The largest number of bins, at least 1.

        Returns:
            Edges, float64, shape ``(bins + 1,)``, ascending; and counts, int64, shape ``(bins,)``.
            Both have shape ``(0,)`` if there are no finite values.

        Raises:
            UsageValueError: The number is below 1.
        """
        if n < 1:
            raise UsageValueError(f"HistogramCounts.rebinned: n is at least 1, got {n!r}.")
        counts = self.counts()
        filled = counts.nonzero().reshape(-1)
        if not len(filled):
            return torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.int64)
        first, last = int(filled[0]), int(filled[-1]) + 1
        lower, upper = self.edges()
        edges = torch.cat([lower[first:last], upper[last - 1 : last]])
        counts = counts[first:last]
        is_inner = torch.zeros(len(edges), dtype=torch.bool)
        is_inner[1:-1] = (counts[1:] == 0) & (counts[:-1] == 0)
        edges, counts = _without_edges(edges, counts, is_inner)
        extra = len(counts) - n
        if extra > 0:
            farther = torch.maximum(edges[:-1].abs(), edges[1:].abs())
            near = farther.argsort()[: extra + 1].sort().values
            is_inner = torch.zeros(len(edges), dtype=torch.bool)
            is_inner[near[1:]] = True
            edges, counts = _without_edges(edges, counts, is_inner)
        return edges, counts

    def _magnitude_edges(self) -> torch.Tensor:
        """Return the lower edges of the bins of magnitudes, and 2**128."""
        bits = torch.arange(255 << self.mantissa_bits) << (23 - self.mantissa_bits)
        edges = bits.to(torch.int32).view(torch.float32).double()
        return torch.cat([edges, torch.tensor([2.0**128], dtype=torch.float64)])


def _without_edges(
    edges: torch.Tensor, counts: torch.Tensor, is_inner: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return edges without some inner ones, and the counts of the joined bins."""
    joined = (~is_inner[:-1]).cumsum(0) - 1
    sums = torch.zeros(int(joined[-1]) + 1, dtype=torch.int64).index_add_(0, joined, counts)
    return edges[~is_inner], sums
