"""Statistics of one tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from popsim_torch.statistics.channels import ChannelStatistics
from popsim_torch.statistics.histogram import HistogramCounts

__all__ = ["Statistics"]


@dataclass(frozen=True)
class Statistics:
    """Statistics of one tensor. What was not asked for is None.

    Moments, the largest values and samples are of the values as they are. The other counts and the
    histogram are of the values in float32, to which integers are rounded.

    Attributes:
        count: The number of values.
        nans: The number of values that are NaN.
        infs: The number of values that are infinite.
        mean: The mean of the finite values, in float64. This and the next five are over the finite
            values, and NaN if there are none.
        std: The standard deviation of the population.
        minimum: The smallest.
        maximum: The largest.
        norm: The square root of the sum of squares.
        absolute_mean: The mean of the magnitudes.
        zeros: The number of values that are 0.
        subnormals: The number of values other than 0 below the smallest normal number of the dtype.
        half_overflows: The number of finite values that are infinite in float16.
        half_underflows: The number of values other than 0 that are 0 in float16.
        histogram: The number of values in each bin.
        top_values: float64; the values with the largest magnitudes (infinities, but not NaN), the
            largest first; equal ones in the order of their positions.
        top_positions: int64; their positions in row-major order.
        samples: float64; the values at equal distances.
        fingerprint: From 0 to ``2**64 - 1``.
        channels: The statistics of each channel; None, too, if the tensor does not have the axis.
    """

    count: int
    nans: int
    infs: int
    mean: float | None = None
    std: float | None = None
    minimum: float | None = None
    maximum: float | None = None
    norm: float | None = None
    absolute_mean: float | None = None
    zeros: int | None = None
    subnormals: int | None = None
    half_overflows: int | None = None
    half_underflows: int | None = None
    histogram: HistogramCounts | None = None
    top_values: torch.Tensor | None = None
    top_positions: torch.Tensor | None = None
    samples: torch.Tensor | None = None
    fingerprint: int | None = None
    channels: ChannelStatistics | None = None
