"""Statistics of several tensors together: of micro-batches, replicas or parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch

from popsim_torch.errors import UsageValueError
from popsim_torch.statistics.channels import ChannelStatistics
from popsim_torch.statistics.histogram import HistogramCounts
from popsim_torch.statistics.results import Statistics

__all__ = ["merge"]

_COUNTS = ("count", "nans", "infs", "zeros", "subnormals", "half_overflows", "half_underflows")


def merge(statistics: Sequence[Statistics]) -> Statistics:
    """Return the statistics of all values together, as far as the parts determine them.

    Counts, moments and histograms are those of all values, also of each channel. The largest
    values, samples and the fingerprint belong to one tensor: they are None. So is what any part
    does not have. One part alone is returned as it is.

    Args:
        statistics: One or more parts.

    Raises:
        UsageValueError: There are no parts, their histograms have different bins, or they have
            different numbers of channels.
    """
    if not statistics:
        raise UsageValueError("merge: there are no statistics; pass those of one part or more.")
    return reduce(_merge_two, statistics)


def _merge_two(one: Statistics, other: Statistics) -> Statistics:
    fields: dict[str, Any] = {name: _joined(_add, one, other, name) for name in _COUNTS}
    fields["histogram"] = _joined(_add_histograms, one, other, "histogram")
    fields["channels"] = _joined(_add_channels, one, other, "channels")
    fields.update(_moments(one, other))
    return Statistics(**fields)


def _joined(function: Callable[[Any, Any], Any], one: Any, other: Any, name: str) -> Any:
    """Return a function of a field of both, or None if one of them does not have it."""
    first, second = getattr(one, name), getattr(other, name)
    return None if first is None or second is None else function(first, second)


def _add(one: int, other: int) -> int:
    return one + other


def _add_histograms(one: HistogramCounts, other: HistogramCounts) -> HistogramCounts:
    if one.mantissa_bits != other.mantissa_bits:
        raise UsageValueError(
            f"merge: histograms of {one.mantissa_bits} and of {other.mantissa_bits} mantissa bits "
            "have different bins; ask for the same bins for all parts."
        )
    return HistogramCounts(
        one.mantissa_bits, one.negative + other.negative, one.positive + other.positive
    )


def _add_channels(one: ChannelStatistics, other: ChannelStatistics) -> ChannelStatistics:
    if one.zeros.shape != other.zeros.shape:
        raise UsageValueError(
            f"merge: {len(one.zeros)} channels and {len(other.zeros)} channels do not correspond; "
            "merge statistics of tensors with the same number of channels."
        )
    finite = [part.count - part.nans - part.infs for part in (one, other)]
    share = finite[1].double() / (finite[0] + finite[1])
    return ChannelStatistics(
        count=one.count + other.count,
        zeros=one.zeros + other.zeros,
        nans=one.nans + other.nans,
        infs=one.infs + other.infs,
        mean=_of_both(one.mean + (other.mean - one.mean) * share, one.mean, other.mean),
        norm=_of_both(torch.hypot(one.norm, other.norm), one.norm, other.norm),
        minimum=torch.fmin(one.minimum, other.minimum),
        maximum=torch.fmax(one.maximum, other.maximum),
    )


def _of_both(both: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return numbers of both parts, or of one where the other is NaN: it has no finite values."""
    return torch.where(other.isnan(), one, torch.where(one.isnan(), other, both))


def _moments(one: Statistics, other: Statistics) -> dict[str, float]:
    """Return the moments of the finite values of both (Chan, Golub, LeVeque 1979)."""
    if one.mean is None or other.mean is None:
        return {}
    counts = [part.count - part.nans - part.infs for part in (one, other)]
    parts: list[Any] = [part for part, count in zip((one, other), counts, strict=True) if count]
    if len(parts) < 2:
        return _moments_of(parts[0] if parts else one)
    first, second = parts
    count = sum(counts)
    share = counts[1] / count
    distance = second.mean - first.mean
    squares = first.std**2 * counts[0] + second.std**2 * counts[1]
    squares += distance**2 * counts[0] * share
    return {
        "mean": first.mean + distance * share,
        "std": math.sqrt(squares / count),
        "minimum": min(first.minimum, second.minimum),
        "maximum": max(first.maximum, second.maximum),
        "norm": math.hypot(first.norm, second.norm),
        "absolute_mean": first.absolute_mean * (1 - share) + second.absolute_mean * share,
    }


def _moments_of(part: Any) -> dict[str, float]:
    names = ("mean", "std", "minimum", "maximum", "norm", "absolute_mean")
    return {name: getattr(part, name) for name in names}
