"""Statistics of each channel of a tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["ChannelStatistics"]


@dataclass(frozen=True)
class ChannelStatistics:
    """Statistics of each channel of a tensor: each index of one axis.

    All tensors have shape ``(channels,)``. The last four are over the finite values of a channel,
    in float64, and NaN where there are none.

    Attributes:
        count: The number of values of each channel.
        zeros: int64; how many of them are 0 (in float32, as for ``Counts``).
        nans: int64; how many are NaN.
        infs: int64; how many are infinite.
        mean: The means.
        norm: The square roots of the sums of squares.
        minimum: The smallest values.
        maximum: The largest values.
    """

    count: int
    zeros: torch.Tensor
    nans: torch.Tensor
    infs: torch.Tensor
    mean: torch.Tensor
    norm: torch.Tensor
    minimum: torch.Tensor
    maximum: torch.Tensor

    @property
    def dead(self) -> torch.Tensor:
        """The channels with values, all of which are 0: their indices, int64."""
        is_dead = (self.zeros == self.count) & (self.count > 0)
        return is_dead.nonzero().reshape(-1)
