"""The rule by which the device adapts the loss scale to the size of the gradients."""

from __future__ import annotations

from dataclasses import dataclass

_LARGEST_HALF = 65504.0


@dataclass(frozen=True)
class LossScaleRule:
    """Halves the loss scale if gradients are close to overflow, and doubles it otherwise.

    The scale of the backward pass is the optimizer's scale times a factor, which begins at 1. In
    each update the values in the parameters' gradients of all micro-batches are counted; after
    every ``period`` updates the factor changes.

    Attributes:
        edge: Values with a larger magnitude than this, and NaN, count as too large; given as a
            share of 65504, the largest number of float16.
        share: The factor is halved if a larger share of the values is too large, and doubled
            otherwise.
        micro_batches: The number of micro-batches of an update, in all replicas.
        period: The number of updates from one change of the factor to the next.
        largest_scale: The factor is not doubled if the optimizer's scale times the factor would
            exceed this.
        least_factor: The factor is not halved below this.
    """

    edge: float = 0.125
    share: float = 1e-7
    period: int = 1
    micro_batches: int = 1
    largest_scale: float = 2.0**15
    least_factor: float = 2.0**-24

    @property
    def threshold(self) -> float:
        """The magnitude above which a value is too large."""
        return self.edge * _LARGEST_HALF
